"""URLs that name several servers: `redis+sentinel://` and `redis+cluster://`, read to the end.

Whatever can't be used is said here, at start: redis-py would say it at the first connection.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode

from redis.connection import parse_url

from retrysafe.urls import check_store_url

__all__ = ["Address", "Hosts", "read_hosts"]

Address = tuple[str, int]

# Given to redis-py's connections as they are.
_CONNECTION = (
    "client_name",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
    "ssl_password",
)
_OURS = ("tls",)
_SENTINELS = ("sentinel_username", "sentinel_password", "sentinel_tls")
_SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class Hosts:
    """What such a URL says. `options` and `sentinel_options` are redis-py's arguments of a
    connection, the latter of those to the sentinels; `service` is "" for a cluster."""

    addresses: tuple[Address, ...]
    service: str
    tls: bool
    options: dict[str, Any] = field(repr=False)
    sentinel_tls: bool
    sentinel_options: dict[str, Any] = field(repr=False)


def read_hosts(url: str) -> Hosts:
    """Read a URL whose form `check_store_url` knows. Raises ValueError with the reason, in which
    no part of the URL is but the name of a parameter."""
    check_store_url(url)
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("#")[0].partition("?")
    credentials, mark, place = place.rpartition("@")
    names, _, path = place.partition("/")
    parts = [part for part in path.split("/") if part]
    sentinel = scheme.endswith("+sentinel")
    service = parts.pop(0) if sentinel else ""
    secure = scheme.startswith("rediss")
    given = _parameters(query, (*_CONNECTION, *_OURS, *(_SENTINELS if sentinel else ())))
    tls = _switch(given, "tls", secure)
    sentinel_tls = _switch(given, "sentinel_tls", tls)
    asked = {name: given.pop(name) for name in _SENTINELS if name in given}
    database = "/" + parts[0] if parts else ""
    # redis-py's reading of credentials and of its own options.
    plain = f"redis://{credentials}{mark}host{database}?{urlencode(given)}"
    options: dict[str, Any] = parse_url(plain)  # type: ignore[no-untyped-call]
    del options["host"]
    shared = {name: value for name, value in options.items() if name.startswith("ssl_")}
    if not tls:
        options = {name: value for name, value in options.items() if name not in shared}
    sentinel_options: dict[str, Any] = dict(shared) if sentinel_tls else {}
    for name in ("username", "password"):
        if f"sentinel_{name}" in asked:
            sentinel_options[name] = asked[f"sentinel_{name}"]
    port = 26379 if sentinel else 6379
    return Hosts(
        tuple(_address(name, port) for name in names.split(",")),
        service,
        tls,
        options,
        sentinel_tls,
        sentinel_options,
    )


def _parameters(query: str, known: tuple[str, ...]) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            shown = name if re.fullmatch(r"[a-z_]{1,30}", name) else "one"
            raise ValueError(f"the parameter {shown!r} is none; it takes {', '.join(known)}")
        given[name] = value
    return given


def _switch(given: dict[str, str], name: str, default: bool) -> bool:
    if name not in given:
        return default
    try:
        return _SWITCH[given.pop(name).lower()]
    except KeyError:
        raise ValueError(f"the parameter {name!r} takes true or false") from None


def _address(text: str, port: int) -> Address:
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text.strip("[]"), port
    return host.strip("[]"), int(number)
