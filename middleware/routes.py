"""Which requests are keyed, and by which policy: patterns, and marks on endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

from starlette.routing import BaseRoute, Match, compile_path

from retrysafe.errors import SettingsError
from retrysafe.policy import IdempotencyPolicy

_MARK = "__retrysafe_policy__"
E = TypeVar("E", bound=Callable[..., Any])
Scope = MutableMapping[str, Any]


def idempotency(policy: IdempotencyPolicy) -> Callable[[E], E]:
    """Mark a Starlette or FastAPI endpoint (function, method or class) with a policy of its own.

    Apply it under the route decorator. The middleware must be mounted; the mark only says how.
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
    """The marked endpoints of an app, looked up once per app and count of routes."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, list[tuple[BaseRoute, Any]]]] = {}

    def policy_for(self, app: Any, scope: Scope) -> IdempotencyPolicy | None:
        """The policy of the endpoint that the request goes to, if it is marked."""
        routes = getattr(app, "routes", None)
        if not routes:
            return None
        known = self._seen.get(id(app))
        if known is None or known[0] != len(routes):
            known = self._seen[id(app)] = (len(routes), list(_marked(routes)))
        return _find(known[1], scope)


def _flat(routes: Iterable[Any]) -> Iterator[Any]:
    """Routes, and what FastAPI keeps behind an included router: routes with its prefix applied."""
    for route in routes:
        included = getattr(route, "effective_route_contexts", None)
        if included is None:
            yield route
            continue
        for each in included():
            yield each if each.endpoint is not None else each.starlette_route


def _marked(routes: Iterable[Any]) -> Iterator[tuple[BaseRoute, Any]]:
    for route in _flat(routes):
        endpoint = getattr(route, "endpoint", None)
        inner = getattr(route, "routes", None)
        if endpoint is not None and _is_marked(endpoint):
            yield route, endpoint
        elif inner and any(_marked(inner)):
            yield route, list(_marked(inner))


def _is_marked(endpoint: Any) -> bool:
    if hasattr(endpoint, _MARK):
        return True
    if not isinstance(endpoint, type):
        return False
    return any(
        hasattr(getattr(endpoint, name, None), _MARK) for name in ("post", "patch", "put", "delete")
    )


def _find(marks: list[tuple[BaseRoute, Any]], scope: Scope) -> IdempotencyPolicy | None:
    for route, marked in marks:
        match, more = route.matches(scope)
        if match is not Match.FULL:
            continue
        if isinstance(marked, list):  # a mount: look below it
            return _find(marked, {**scope, **more})
        own = getattr(getattr(marked, scope["method"].lower(), None), _MARK, None)
        found: IdempotencyPolicy | None = own or getattr(marked, _MARK, None)
        return found
    return None
