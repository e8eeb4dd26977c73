"""From a call's arguments to its key and its fingerprint.

A call is bound to the function's signature first, so that position, keyword and default are one
form. `self` and `cls` are in neither, unless the object has `__retrysafe_key__()` or the key
names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from retrysafe import keys
from retrysafe.errors import KeyInvalid, NotEncodable

KeySpec = str | Sequence[str] | Callable[..., Any] | None
FingerprintSpec = Literal["none"] | str | Sequence[str] | Callable[..., Any] | None

_EMPTY = inspect.Parameter.empty
_MISSING: Any = object()
_LEGIBLE = 120
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Binder:
    """Binds calls to a signature, `inspect.Signature.bind` made quick for the plain ones."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        parameters = signature.parameters.values()
        self.names = [parameter.name for parameter in parameters]
        self.extra = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._positional = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self._defaults = {p.name: p.default for p in parameters if p.default is not _EMPTY}
        self._plain = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
        self._known = frozenset(self.names)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, defaults filled in. Raises TypeError as a call would."""
        if self._plain and len(args) <= len(self._positional) and self._known.issuperset(kwargs):
            found = dict(zip(self._positional, args, strict=False))
            if found.keys().isdisjoint(kwargs):
                bound = {**self._defaults, **found, **kwargs}
                if len(bound) == len(self.names):
                    return bound
        slow = self.signature.bind(*args, **kwargs)
        slow.apply_defaults()
        return slow.arguments

    def bind_some(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The same where arguments may be missing: those are absent."""
        slow = self.signature.bind_partial(*args, **kwargs)
        return {**self._defaults, **slow.arguments}


class _Path:
    """An argument, or a member of one: `order`, `order.id`."""

    def __init__(self, text: str, binder: Binder, owner: str) -> None:
        self.text = text
        self.name, *self.members = text.split(".")
        self.in_extra = self.name not in binder.names
        self.extra = binder.extra
        if not all(part.isidentifier() for part in (self.name, *self.members)) or (
            self.in_extra and self.extra is None
        ):
            raise TypeError(
                f"{owner} has no argument {self.name!r}; it takes {', '.join(binder.names) or '-'}"
            )

    def of(self, arguments: Mapping[str, Any]) -> Any:
        if self.in_extra and self.extra is not None:
            arguments = arguments.get(self.extra, {})
        value = arguments.get(self.name, _MISSING)
        if value is _MISSING:
            raise TypeError(f"the argument {self.name!r} is needed: the key is made of it")
        for member in self.members:
            if isinstance(value, Mapping):
                value = value.get(member, _MISSING)
            else:
                value = getattr(value, member, _MISSING)
            if value is _MISSING:
                raise NotEncodable(f"the argument {self.name!r} has no {self.text!r}")
        return value


class Arguments:
    """Key and fingerprint of the calls of one function.

    `receiver` is the name of the parameter that is self or cls, if there is one. Raises TypeError
    for names the function doesn't have.
    """

    def __init__(
        self,
        signature: inspect.Signature,
        owner: str,
        receiver: str | None,
        key: KeySpec,
        fingerprint: FingerprintSpec,
    ) -> None:
        self._binder = Binder(signature)
        self._owner = owner
        self._receiver = receiver
        self._key_function = key if callable(key) else None
        self._key_paths = self._paths(key, "key")
        self._all = key is None
        self._print_function = fingerprint if callable(fingerprint) else None
        self._print_paths: list[_Path] | None = None
        self._no_print = fingerprint == "none" or (fingerprint is None and key is None)
        if fingerprint is not None and not self._no_print:
            self._print_paths = self._paths(fingerprint, "fingerprint")
        named = {path.name for path in self._key_paths if not path.members}
        self._key_names = named | ({receiver} if receiver else set())

    def _paths(self, spec: Any, option: str) -> list[_Path]:
        if spec is None or callable(spec):
            return []
        texts = (spec,) if isinstance(spec, str) else spec
        if (
            not isinstance(texts, list | tuple)
            or not texts
            or not all(isinstance(text, str) for text in texts)
        ):
            raise TypeError(
                f"{option}= takes the name of an argument, several, or a callable, not {spec!r}"
            )
        return [_Path(text, self._binder, self._owner) for text in texts]

    def of_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, bytes]:
        """The key's text and the fingerprint (16 bytes), from all arguments of a call.

        Raises NotEncodable, naming the argument, for one that has no canonical form.
        """
        arguments = self._binder.bind(args, kwargs)
        return self._key(arguments, args, kwargs), self._fingerprint(arguments, args, kwargs)

    def of_key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The key's text alone; arguments that aren't in the key may be missing."""
        bind = self._binder.bind_some if self._key_paths else self._binder.bind
        arguments = {} if self._key_function else bind(args, kwargs)
        return self._key(arguments, args, kwargs)

    def _key(
        self, arguments: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        parts: list[tuple[str, Any]] = []
        if self._receiver is not None:
            receiver = args[0] if args else arguments.get(self._receiver)
            own = getattr(receiver, "__retrysafe_key__", None)
            if callable(own) and not isinstance(receiver, type):
                parts.append((self._receiver, own()))
        if self._key_function is not None:
            value = self._key_function(*args, **kwargs)
            if value is None:
                raise KeyInvalid(f"the key function of {self._owner} returned None")
            parts.append(("key", value))
        elif self._all:
            parts += [each for each in arguments.items() if each[0] != self._receiver]
        else:
            for path in self._key_paths:
                if not (parts and path.text == self._receiver):
                    parts.append((path.text, path.of(arguments)))
        if len(parts) == 1 and not self._all:
            return _text(parts[0][1], self._canonical(*parts[0]))
        return _composed(b"".join(self._part(*part) for part in parts))

    def _fingerprint(
        self, arguments: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bytes:
        if self._no_print:
            return keys.NO_FINGERPRINT
        if self._print_function is not None:
            parts = [("fingerprint", self._print_function(*args, **kwargs))]
        elif self._print_paths is not None:
            parts = [(path.text, path.of(arguments)) for path in self._print_paths]
        else:
            parts = [each for each in arguments.items() if each[0] not in self._key_names]
        scheme = "arguments" if self._print_function is None else "callable"
        return keys.fingerprint(scheme, *(self._part(*part) for part in parts))

    def _part(self, name: str, value: Any) -> bytes:
        data = self._canonical(name, value)
        return b"%s=%d:%s;" % (name.encode(), len(data), data)

    def _canonical(self, name: str, value: Any) -> bytes:
        try:
            return keys.canonical(value)
        except NotEncodable as error:
            raise NotEncodable(
                f"the argument {name!r} of {self._owner} can't be part of a key or fingerprint: "
                f"{error.what}; name what identifies the call in key=, and in fingerprint= (or "
                'fingerprint="none") what must be equal'
            ) from None


def _text(value: Any, canonical: bytes) -> str:
    """A text stays as it is, so that people can name a receipt by it; what isn't one (or looks
    like the other form) is written so that it can't be mistaken for a text."""
    if type(value) is str and not value.startswith("~"):
        return value
    return _composed(canonical)


def _composed(canonical: bytes) -> str:
    # A short one is left legible: it is what a recovery function gets to read. Hex has no colon.
    if len(canonical) <= _LEGIBLE and canonical.isascii() and canonical.decode().isprintable():
        return "~" + canonical.decode()
    return "~" + blake2b(canonical, digest_size=32).hexdigest()


def receiver_of(function: Any, signature: inspect.Signature) -> str | None:
    """The parameter that is self or cls: the first of a function made in a class body."""
    qualname: str = getattr(function, "__qualname__", "")
    if isinstance(function, staticmethod) or "." not in qualname:
        return None
    if qualname.rpartition(".")[0].endswith("<locals>"):
        return None
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in _VARIADIC:
        return None
    return first.name if isinstance(function, classmethod) or first.name in _RECEIVERS else None


_RECEIVERS = ("self", "cls", "mcs", "_self", "_cls")
