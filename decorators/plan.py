"""What is decided about an idempotent function when it is decorated, and at its first call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from retrysafe import keys
from retrysafe.codec import ResultCodec, codec_for, custom_codec
from retrysafe.context import request_id
from retrysafe.decorators.annotations import return_annotation
from retrysafe.decorators.arguments import Arguments, receiver_of
from retrysafe.errors import NotEncodable, RecordCorrupt, ResultNotKept, StoreUnavailable
from retrysafe.events import Event, emit
from retrysafe.kept_errors import TAG, KeptErrors
from retrysafe.policy import IdempotencyPolicy, ResolvedPolicy
from retrysafe.receipts import AsyncHeld, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.settings import Settings
from retrysafe.stores import Store, open_store

logger = logging.getLogger("retrysafe")

AnyReceipts = Receipts | AsyncReceipts


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `@idempotent`, as they were given."""

    key: Any = None
    namespace: str | None = None
    version: int | str | None = None
    ttl: float | None = None
    lease: float | None = None
    wait: float | None = None
    on_abandoned: Any = None
    on_store_error: str | None = None
    store: Store | str | None = None
    codec: Any = None
    keep_errors: Any = ()
    fingerprint: Any = None

    def policy(self) -> IdempotencyPolicy:
        """What was given of a policy; the settings say the rest."""
        if callable(self.ttl):
            raise TypeError("ttl= takes seconds: a function's result has no status to ask for one")
        names = ("ttl", "lease", "wait", "on_abandoned", "on_store_error")
        given: dict[str, Any] = {
            name: value for name in names if (value := getattr(self, name)) is not None
        }
        return IdempotencyPolicy(**given)


class Plan:
    """One decorated function: its keys, its results, its receipts.

    Raises TypeError (generators, unknown argument names, …) or NotEncodable (results that can't
    be stored) when it is made. The store and the settings are looked up at the first call, so that
    a module can be imported before they are known.
    """

    def __init__(
        self,
        function: Any,
        options: Options,
        local: Mapping[str, Any],
        codec: ResultCodec | None = None,
    ) -> None:
        inner, self.leading, keywords = _inner(function)
        self.owner = _name_of(inner)
        _refuse_generators(inner, self.owner)
        self.is_async = _is_async(function)
        signature = inspect.signature(inner, follow_wrapped=True)
        if keywords:
            signature = _with_defaults(signature, keywords)
        self.receiver = receiver_of(function, signature)
        self.arguments = Arguments(
            signature, self.owner, self.receiver, options.key, options.fingerprint
        )
        self.scope = options.namespace or self.owner
        if options.version is not None:
            self.scope += f"@{options.version}"
        self.errors = KeptErrors(options.keep_errors)
        self._policy = options.policy()
        self._store = open_store(options.store) if isinstance(options.store, str) else options.store
        self._function = inner
        self._codec = codec
        self._ready: AnyReceipts | None = None
        self._disabled: bool | None = None
        self._lock = threading.Lock()
        if options.codec is not None:
            self._codec = custom_codec(options.codec)
        elif codec is None:
            with contextlib.suppress(NameError):  # a class still being made: looked up later
                self._codec = codec_for(return_annotation(inner, local))

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Key and fingerprint of a call. Raises NotEncodable before anything is claimed."""
        if self._codec is None:
            self._codec = self._late_codec(args)
        key, fingerprint = self.arguments.of_call(args, kwargs)
        return Call(key, self.scope, fingerprint)

    def disabled(self) -> bool:
        """Whether the settings say that everything passes through."""
        if self._disabled is None:
            self._disabled = Settings.from_env().disabled
            if self._disabled:
                _warn_disabled()
        return self._disabled

    def receipts(self) -> AnyReceipts:
        """The receipts, in the function's colour. Raises SettingsError."""
        if self._ready is None:
            settings = Settings.from_env()
            policy = self._policy.resolve(settings)
            store = self._store if self._store is not None else open_store(None)
            kind = AsyncReceipts if self.is_async else Receipts
            with self._lock:
                if self._ready is None:
                    self._ready = kind(store, policy, settings.max_waiters)
        return self._ready

    def recover(self, policy: ResolvedPolicy, held: Held | AsyncHeld) -> Any:
        """Ask the policy's function about a call whose owner died: Recovered, None, or an
        awaitable of them."""
        ask = policy.on_abandoned
        if held.abandoned is None or not callable(ask):
            return None
        return ask(held.abandoned)

    def pack(self, held: Held | AsyncHeld, value: Any) -> tuple[bytes | None, Any]:
        """The payload (None: it can't be stored, told in an event), and the caller's answer."""
        assert self._codec is not None
        try:
            return self._codec.pack(value)
        except NotEncodable as error:
            self._not_kept(held, error)
            return None, value

    def pack_error(self, held: Held | AsyncHeld, error: Exception) -> bytes | None:
        """The payload of an error that is a result."""
        try:
            return self.errors.pack(error)
        except NotEncodable as failure:
            self._not_kept(held, failure)
            return None

    def answer(self, receipts: AnyReceipts, call: Call, record: Record) -> Any:
        """The recorded result, or raise the recorded error.

        Raises ResultNotKept, and RecordCorrupt where the record can't be read as the type the
        function has now: the work is never run again for that.
        """
        if record.payload is None:
            raise ResultNotKept(digest_of(receipts, call))
        assert self._codec is not None
        try:
            if record.payload[:1] != TAG:
                return self._codec.unpack(record.payload)
            error = self.errors.unpack(record.payload)
        except NotEncodable as failure:
            digest = digest_of(receipts, call)
            self._tell("record-corrupt", digest, failure.what)
            raise RecordCorrupt(digest, failure.what) from failure
        raise error

    def or_unprotected(self, receipts: AnyReceipts, call: Call, error: StoreUnavailable) -> None:
        """Raise the error, unless the user chose to run unprotected: then say so."""
        if receipts.policy.on_store_error != "run":
            raise error
        self._tell("unprotected", digest_of(receipts, call), "the store is out of reach")

    def _not_kept(self, held: Held | AsyncHeld, error: NotEncodable) -> None:
        self._tell("result-not-kept", held.name, error.what)

    def _tell(self, kind: str, digest: str, detail: str) -> None:
        scope = blake2b(self.scope.encode(), digest_size=8).hexdigest()
        emit(Event(kind, digest, scope, request_id=request_id() or "", detail=detail))

    def _late_codec(self, args: tuple[Any, ...]) -> ResultCodec:
        local: dict[str, Any] = {}
        if self.receiver is not None and args:
            kind = args[0] if isinstance(args[0], type) else type(args[0])
            local = {each.__name__: each for each in kind.__mro__}
        try:
            return codec_for(return_annotation(self._function, local))
        except NameError as error:
            raise NotEncodable(
                f"the return annotation of {self.owner} can't be read: {error}; define or import "
                "the name where the function can see it"
            ) from None


@functools.cache
def _warn_disabled() -> None:
    logger.warning("RETRYSAFE_DISABLED is set: idempotent functions run unprotected")


def digest_of(receipts: AnyReceipts, call: Call) -> str:
    """The digest (hex) that names a call's receipt."""
    return keys.digest(receipts.store.namespace, call.scope, call.key).hex()


def _inner(function: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function itself, out of classmethod, staticmethod and partial, and what they bind."""
    leading: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while True:
        if isinstance(function, functools.partial):
            leading = (*function.args, *leading)
            keywords = {**function.keywords, **keywords}
            function = function.func
        elif isinstance(function, staticmethod | classmethod):
            function = function.__func__
        else:
            break
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"@idempotent takes a function or method, not {function!r}")
    return function, leading, keywords


def _is_async(function: Any) -> bool:
    inner = _inner(function)[0]
    call = getattr(type(inner), "__call__", None)  # noqa: B004  # asked for itself, not whether
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(call)


def _refuse_generators(function: Any, owner: str) -> None:
    inner = inspect.unwrap(function)
    call = getattr(type(inner), "__call__", None)  # noqa: B004  # asked for itself, not whether
    for each in (function, inner, call):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise TypeError(
                f"{owner} is a generator: its result is not a value that can be recorded; return "
                "a list, or make the step that has the effect idempotent"
            )


def _name_of(function: Callable[..., Any]) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _with_defaults(signature: inspect.Signature, keywords: dict[str, Any]) -> inspect.Signature:
    """What `functools.partial` does to a signature: bound keywords become defaults."""
    parameters = []
    keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.name in keywords:
            parameter = parameter.replace(default=keywords[parameter.name])
            keyword_only = True
        if keyword_only and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            parameter = parameter.replace(kind=parameter.KEYWORD_ONLY)
        parameters.append(parameter)
    return signature.replace(parameters=parameters)
