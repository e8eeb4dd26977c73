"""What a user decides about one channel or function, and the concrete values it comes to."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from retrysafe import setting_kinds as kinds
from retrysafe import units
from retrysafe.errors import SettingsError
from retrysafe.settings import Settings

__all__ = ["IdempotencyPolicy", "Recovered", "ResolvedPolicy"]

logger = logging.getLogger("retrysafe")

OnAbandoned = Literal["rerun", "refuse"] | Callable[..., Any]
OnStoreError = Literal["refuse", "run"]
OnLeaseLost = Literal["continue", "cancel"]
Fingerprint = Literal["body", "json", "none"] | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a recovery function (`on_abandoned=`) returns where the work did happen: its `result`
    is recorded and answered. None says that it didn't happen: the work runs."""

    result: Any


_KINDS: dict[str, kinds.Kind] = {
    "ttl": kinds.TTL,
    "lease": kinds.DURATION,
    "wait": kinds.WAIT,
    "on_abandoned": kinds.ABANDONED,
    "on_store_error": kinds.STORE_ERROR,
    "on_lease_lost": kinds.LEASE_LOST,
    "require_key": kinds.SWITCH,
    "fingerprint": kinds.FINGERPRINT,
    "keep": kinds.function("a callable of status and headers that returns a bool"),
    "applies": kinds.function("a callable of the ASGI scope that returns a bool"),
    "max_request_body": kinds.SIZE,
    "max_response_body": kinds.SIZE,
    "max_receipts": kinds.count(0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyPolicy:
    """How calls are made idempotent. Each field is optional: the settings fill the rest.

    - `ttl`: seconds a result answers retries, or a callable of the status that returns them
    - `lease`: seconds a silent owner keeps its receipt; renewed at a third of it
    - `wait`: seconds a duplicate waits for the call in flight; 0: answered at once
    - `on_abandoned`: the owner died. `rerun`, `refuse`, or a callable given the abandoned receipt,
      which returns `Recovered(result)`, or None to run the work again
    - `on_store_error`: the store is out of reach before the work. `refuse`, or `run` unprotected
    - `on_lease_lost`: somebody else may run this by now. `continue`, or `cancel` the work
    - `require_key`: refuse a keyed call without a key
    - `fingerprint`: `body`, `json` (canonical), `none`, or a callable
    - `keep`: `keep(status, headers)` decides whether a result is recorded
    - `applies`: `applies(scope)` decides whether a request is keyed at all
    - `max_request_body`, `max_response_body`: bytes
    - `max_receipts`: how many receipts one caller's requests may have at a time, over all routes;
      one more is answered 429. Each counts for `ttl` from its request. 0: no limit

    Raises SettingsError, which lists every field at fault.
    """

    ttl: float | Callable[[int], float] | None = None
    lease: float | None = None
    wait: float | None = None
    on_abandoned: OnAbandoned | None = None
    on_store_error: OnStoreError | None = None
    on_lease_lost: OnLeaseLost | None = None
    require_key: bool | None = None
    fingerprint: Fingerprint | None = None
    keep: Callable[[int, Any], bool] | None = None
    applies: Callable[[MutableMapping[str, Any]], bool] | None = None
    max_request_body: int | None = None
    max_response_body: int | None = None
    max_receipts: int | None = None

    def __post_init__(self) -> None:
        faults: list[str] = []
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            try:
                object.__setattr__(self, name, kind.check(value))
            except ValueError as error:
                faults.append(
                    f"{name} holds {value!r} ({error}); it takes {kind.in_code or kind.takes}"
                )
        if not faults:
            faults = _too_short(self.ttl, wait=self.wait, lease=self.lease)
        if faults:
            raise SettingsError(faults)

    def resolve(self, settings: Settings) -> ResolvedPolicy:
        """The concrete policy: what isn't said here comes from `settings`.

        A `ttl` said here shortens a `wait` and a `lease` that only the settings say: the nearer
        word wins. Raises SettingsError where both are said, or where a `wait` or `lease` said here
        is longer than the settings' TTL.
        """
        values: dict[str, Any] = {
            each.name: getattr(self, each.name)
            if getattr(self, each.name) is not None
            else getattr(settings, each.name, _NEITHER.get(each.name))
            for each in dataclasses.fields(self)
        }
        ttl = values.pop("ttl")
        default_ttl = settings.ttl if callable(ttl) else ttl
        for name in ("wait", "lease"):
            if self.ttl is not None and not callable(self.ttl) and getattr(self, name) is None:
                values[name] = min(values[name], default_ttl)
        faults = _too_short(default_ttl, wait=values["wait"], lease=values["lease"])
        if faults:
            raise SettingsError(faults)
        return ResolvedPolicy(
            ttl=default_ttl, ttl_by_status=ttl if callable(ttl) else None, **values
        )


# What the settings don't say.
_NEITHER: dict[str, Any] = {"on_lease_lost": "continue", "fingerprint": "body"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPolicy:
    """A policy with every value decided; `ttl`, `lease` and `wait` are seconds."""

    ttl: float
    lease: float
    wait: float
    on_abandoned: OnAbandoned
    on_store_error: OnStoreError
    on_lease_lost: OnLeaseLost
    require_key: bool
    fingerprint: Fingerprint
    keep: Callable[[int, Any], bool] | None
    applies: Callable[[MutableMapping[str, Any]], bool] | None
    max_request_body: int
    max_response_body: int
    max_receipts: int
    ttl_by_status: Callable[[int], float] | None = None

    def ttl_for(self, status: int | None) -> float:
        """Seconds to keep a receipt: of a result with `status`, or (None) one without a status.

        The work is done when this is asked. So a callable that raises, or returns what is no
        duration, is logged, and `ttl` holds: the record must not be lost with it.
        """
        if status is None or self.ttl_by_status is None:
            return self.ttl
        try:
            return units.check_duration(self.ttl_by_status(status))
        except Exception:
            logger.exception(
                "the policy's ttl(%s) failed; the receipt is kept for %g s", status, self.ttl
            )
            return self.ttl


def _too_short(ttl: Any, *, wait: float | None, lease: float | None) -> list[str]:
    if ttl is None or callable(ttl):
        return []
    return [
        f"ttl ({units.format_duration(ttl)}) is shorter than {name} "
        f"({units.format_duration(value)}): {reason}; make ttl at least as long"
        for name, value, reason in (
            ("wait", wait, "a waiting duplicate could outlive the result it waits for"),
            ("lease", lease, "a running call's receipt could vanish under it"),
        )
        if value is not None and ttl < value
    ]
