"""Which requests are keyed, and by which policy: patterns, and marks on endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.routing import BaseRoute, Host, Match, Mount, compile_path

from retrysafe.errors import SettingsError
from retrysafe.policy import IdempotencyPolicy

_MARK = "__retrysafe_policy__"
_HTTP_METHODS = ("get", "head", "post", "put", "patch", "delete", "options")
_MAX_LAYERS = 100  # how far through middleware an app is looked for
E = TypeVar("E", bound=Callable[..., Any])
Scope = MutableMapping[str, Any]


def idempotency(policy: IdempotencyPolicy) -> Callable[[E], E]:
    """Mark a Starlette or FastAPI endpoint (function, method or class) with a policy of its own.

    Apply it under the route decorator. The middleware must be mounted; the mark only says how.
    On an endpoint of methods that are not keyed (`RETRYSAFE_METHODS`) it has no effect: the app
    then doesn't start.
    """
    if not isinstance(policy, IdempotencyPolicy):
        raise TypeError(
            "@idempotency takes an IdempotencyPolicy: @idempotency(IdempotencyPolicy())"
        )

    def mark(endpoint: E) -> E:
        if not callable(endpoint):
            raise TypeError("@idempotency marks an endpoint: a function, a method or a class")
        setattr(endpoint, _MARK, policy)
        return endpoint

    return mark


class Patterns:
    """`routes=`: path templates in Starlette's syntax, matched against the path below the mount."""

    def __init__(self, routes: Iterable[str]) -> None:
        if isinstance(routes, str):
            raise SettingsError(["routes takes a list of path templates, not one text"])
        templates = list(routes)
        bad = [each for each in templates if not (isinstance(each, str) and each[:1] == "/")]
        if bad:
            raise SettingsError([f"routes holds {bad!r}; a path template begins with '/'"])
        try:
            self._patterns = [compile_path(each)[0] for each in templates]
        except (AssertionError, ValueError) as error:
            raise SettingsError([f"routes holds a template that can't be read: {error}"]) from None

    def match(self, scope: Scope) -> bool:
        """Whether a request's path matches one of them."""
        path, root = scope.get("path", ""), scope.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root) :]
        return any(pattern.match(path) for pattern in self._patterns)


class Marks:
    """The marked endpoints of an app, looked up once per app and count of routes.

    `methods` are those that are keyed at all: a mark on an endpoint of other ones is a fault.
    """

    def __init__(self, methods: Iterable[str]) -> None:
        self._methods = frozenset(methods)
        self._seen: dict[int, tuple[int, list[_Entry]]] = {}

    def policy_for(self, app: Any, scope: Scope) -> IdempotencyPolicy | None:
        """The policy of the endpoint that the request goes to, if it is marked."""
        routes = routes_of(app)
        if not routes:
            return None
        known = self._seen.get(id(app))
        if known is None or known[0] != len(routes):
            known = self._seen[id(app)] = (len(routes), _entries(routes))
        return _find(known[1], scope)

    def faults(self, app: Any) -> list[str]:
        """What is marked without effect, one text each."""
        return list(self._faults(_entries(routes_of(app))))

    def _faults(self, entries: list[_Entry]) -> Iterator[str]:
        for entry in entries:
            if isinstance(entry.marked, list):
                yield from self._faults(entry.marked)
                continue
            methods = _methods(entry.route, entry.marked)
            if methods and not methods & self._methods:
                path = getattr(entry.route, "path", "an endpoint")
                yield (
                    f"@idempotency on {path} has no effect: it answers "
                    f"{', '.join(sorted(methods))}, and METHODS is "
                    f"{', '.join(sorted(self._methods))}; add it there, or take the mark off"
                )


@dataclass(frozen=True, slots=True)
class _Entry:
    """A route in its place. `marked` is its endpoint, the entries below a mount, or None: a route
    without a mark that comes before one with it, and may take its requests."""

    route: BaseRoute
    marked: Any


def routes_of(app: Any) -> list[Any]:
    """The routes of an app, behind whatever middleware is wrapped around it."""
    for _ in range(_MAX_LAYERS):
        if app is None:
            break
        routes = getattr(app, "routes", None)
        if routes and isinstance(routes, (list, tuple)):
            return routes if isinstance(routes, list) else list(routes)
        app = getattr(app, "app", None)
    return []


def _flat(routes: Iterable[Any]) -> Iterator[Any]:
    """Routes, and what FastAPI keeps behind an included router: routes with its prefix applied."""
    for route in routes:
        included = getattr(route, "effective_route_contexts", None)
        if included is None:
            yield route
            continue
        for each in included():
            yield each if each.endpoint is not None else each.starlette_route


def _entries(routes: Iterable[Any]) -> list[_Entry]:
    """All routes up to the last that is marked; none where none is."""
    entries: list[_Entry] = []
    end = 0
    for route in _flat(routes):
        endpoint = getattr(route, "endpoint", None)
        marked: Any = None
        if endpoint is not None:
            marked = endpoint if _is_marked(endpoint) else None
        elif inner := _below(route):
            marked = _entries(inner) or None
        entries.append(_Entry(route, marked))
        if marked is not None:
            end = len(entries)
    return entries[:end]


def _below(route: Any) -> list[Any]:
    # Other frameworks' routes lead back to their app by the same name.
    return routes_of(route) if isinstance(route, (Mount, Host)) else []


def _marked_methods(endpoint: type) -> Iterator[str]:
    for name in _HTTP_METHODS:
        if hasattr(getattr(endpoint, name, None), _MARK):
            yield name


def _is_marked(endpoint: Any) -> bool:
    if hasattr(endpoint, _MARK):
        return True
    return isinstance(endpoint, type) and any(_marked_methods(endpoint))


def _methods(route: Any, endpoint: Any) -> set[str]:
    """The methods that a mark is about; empty where any, or where there is no mark."""
    if endpoint is None:
        return set()
    if not isinstance(endpoint, type):
        return set(getattr(route, "methods", None) or ())
    if hasattr(endpoint, _MARK):
        return {name.upper() for name in _HTTP_METHODS if hasattr(endpoint, name)}
    return {name.upper() for name in _marked_methods(endpoint)}


def _find(entries: list[_Entry], scope: Scope) -> IdempotencyPolicy | None:
    for entry in entries:
        match, more = entry.route.matches(scope)
        if match is not Match.FULL:
            continue
        marked = entry.marked
        if isinstance(marked, list):  # a mount: look below it
            return _find(marked, {**scope, **more})
        own = getattr(getattr(marked, scope["method"].lower(), None), _MARK, None)
        found: IdempotencyPolicy | None = own or getattr(marked, _MARK, None)
        return found
    return None
