"""Settings: each one an environment variable `RETRYSAFE_<NAME>`, each one checked at start.

A wrong setting is an error, not a warning, and all of them are told at once.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from retrysafe import setting_kinds as kinds
from retrysafe import units
from retrysafe.encryption_keys import EncryptionKeys
from retrysafe.errors import SettingsError
from retrysafe.setting_kinds import BackoffSpec, Kind, parse_backoff
from retrysafe.urls import masked

__all__ = ["PREFIX", "BackoffSpec", "Settings", "parse_backoff"]

PREFIX = "RETRYSAFE_"

# Kubernetes puts these into every pod beside a service whose name begins with "retrysafe".
_SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT\w*)|\w+_PORT(_\d+_(TCP|UDP|SCTP)\w*)?")

_KEY = re.compile(r"[A-Za-z0-9+/_-]{40,}={0,2}", re.ASCII)


def _setting(default: Any, kind: Kind) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """Every `RETRYSAFE_*` variable, without the prefix, in lower case. Durations are seconds.

    Build it from the environment (`Settings.from_env()`) or in code; both are checked the same
    way and raise SettingsError, which lists every fault.
    """

    redis_url: str | None = _setting(None, kinds.URL)
    namespace: str = _setting("retrysafe", kinds.NAMESPACE)
    ttl: float = _setting(86400.0, kinds.DURATION)
    lease: float = _setting(30.0, kinds.DURATION)
    wait: float = _setting(10.0, kinds.WAIT)
    max_waiters: int = _setting(10_000, kinds.count(0))
    max_receipts: int = _setting(0, kinds.count(0))
    on_abandoned: str | Callable[..., Any] = dataclasses.field(
        default="rerun", metadata={"kind": kinds.ABANDONED}
    )
    on_store_error: str = _setting("refuse", kinds.STORE_ERROR)
    encryption_keys: EncryptionKeys | None = dataclasses.field(
        default=None, metadata={"kind": kinds.ENCRYPTION_KEYS}
    )
    replicas: int = _setting(0, kinds.count(0))
    methods: frozenset[str] = _setting(frozenset({"POST", "PATCH"}), kinds.METHODS)
    require_key: bool = _setting(False, kinds.SWITCH)
    key_header: str = _setting("Idempotency-Key", kinds.HEADER)
    max_request_body: int = _setting(10 * 2**20, kinds.SIZE)
    max_response_body: int = _setting(4 * 2**20, kinds.SIZE)
    disabled: bool = _setting(False, kinds.SWITCH)
    request_id_header: str = _setting("X-Request-ID", kinds.HEADER)
    retry_attempts: int = _setting(4, kinds.count(1))
    retry_deadline: float = _setting(30.0, kinds.DURATION)
    retry_backoff: str = _setting("full-jitter:100ms..10s", kinds.BACKOFF)
    breaker_failure_rate: float = _setting(0.5, kinds.RATE)
    breaker_min_calls: int = _setting(20, kinds.count(1))
    breaker_open_for: float = _setting(30.0, kinds.DURATION)
    breaker_probes: int = _setting(1, kinds.count(1))

    def __post_init__(self) -> None:
        faults: list[str] = []
        sound: dict[str, Any] = {}
        for name, kind in _kinds():
            value = getattr(self, name)
            try:
                sound[name] = kind.check(value)
                object.__setattr__(self, name, sound[name])
            except ValueError as error:
                faults.append(_fault(name, _shown(value, kind), error, kind.in_code or kind.takes))
        faults += _conflicts(sound, str)
        if faults:
            raise SettingsError(faults)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment (or `environ`). Raises SettingsError with every fault in it."""
        environ = os.environ if environ is None else environ
        variables = {PREFIX + name.upper(): (name, kind) for name, kind in _kinds()}
        faults = _unknown(environ, variables)
        given: dict[str, Any] = {}
        sound = {each.name: each.default for each in dataclasses.fields(cls)}
        for variable, (name, kind) in variables.items():
            if variable not in environ:
                continue
            text = environ[variable]
            try:
                if not text.strip():
                    raise ValueError("empty; unset it for the default")
                given[name] = sound[name] = kind.check(kind.parse(text))
            except ValueError as error:
                del sound[name]
                faults.append(_fault(variable, _shown(text, kind), error, kind.takes))
        faults += _conflicts(sound, lambda name: PREFIX + name.upper())
        if faults:
            raise SettingsError(faults)
        return cls(**given)

    @property
    def backoff(self) -> BackoffSpec:
        """`retry_backoff`, parsed."""
        return parse_backoff(self.retry_backoff)

    def __repr__(self) -> str:
        pairs = (f"{name}={_shown(getattr(self, name), kind)}" for name, kind in _kinds())
        return f"Settings({', '.join(pairs)})"


def _kinds() -> list[tuple[str, Kind]]:
    return [(each.name, each.metadata["kind"]) for each in dataclasses.fields(Settings)]


def _shown(value: object, kind: Kind) -> str:
    if kind.secret and value is not None:
        return "***"
    # Any text may be a URL, or a key, that was put into the wrong variable.
    text = masked(value) if isinstance(value, str) else value
    if isinstance(text, str) and "://" not in text:
        text = _KEY.sub("***", text)
    shown = repr(text)
    return shown if len(shown) <= 200 else shown[:200] + "…"


def _fault(name: str, shown: str, reason: Exception, takes: str) -> str:
    return f"{name} holds {shown} ({reason}); it takes {takes}"


def _conflicts(values: Mapping[str, Any], named: Callable[[str], str]) -> list[str]:
    """Faults of settings that are sound alone but not together; absent ones are left out."""
    faults: list[str] = []
    ttl = values.get("ttl")
    for name, reason in (
        ("wait", "a waiting duplicate could outlive the result it waits for"),
        ("lease", "a running call's receipt could vanish under it"),
    ):
        if ttl is not None and name in values and ttl < values[name]:
            faults.append(
                f"{named('ttl')} is {units.format_duration(ttl)}, shorter than {named(name)} "
                f"({units.format_duration(values[name])}): {reason}; "
                f"make {named('ttl')} at least as long"
            )
    key, request = values.get("key_header"), values.get("request_id_header")
    if key and request and key.lower() == request.lower():
        faults.append(
            f"{named('key_header')} and {named('request_id_header')} are both {key!r}; "
            "they take two different headers"
        )
    return faults


def _unknown(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    names = list(known)
    faults: list[str] = []
    for variable in sorted(environ):
        if variable in names or _SERVICE_LINK.fullmatch(variable):
            continue
        if not variable.startswith(PREFIX) and variable.upper() not in names:
            continue
        near = get_close_matches(variable.upper(), names, n=1, cutoff=0.0)
        faults.append(f"{variable} is no setting of retrysafe; the nearest is {near[0]}")
    return faults
