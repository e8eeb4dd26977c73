"""Store URLs: their forms, checked without connecting, and shown without their secrets."""

from __future__ import annotations

import re

__all__ = ["URL_FORMS", "check_store_url", "masked"]

URL_FORMS = (
    "redis://host:6379/0, rediss://…, unix:///path, redis+sentinel://h1,h2/service, "
    "redis+cluster://h1,h2 or memory://"
)
SEVERAL = ("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
SCHEMES = ("redis", "rediss", "unix", *SEVERAL, "memory")

_SECRET = re.compile(r"((?:^|[?&;\s])[^=&?]*(?:pass|secret|token|pwd|auth)[^=&?]*=)[^&]*", re.I)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:,@\[\]/]+)(?::(\d{1,5}))?", re.ASCII)


def masked(text: str) -> str:
    """`text` with everything that may be a credential in a URL replaced by `***`."""
    head, mark, rest = text.rpartition("@")
    if mark:
        if _SECRET.search(head):  # the "@" may be a part of that secret, and so what follows it
            rest = "***"
        scheme, slashes, _ = head.partition("://")
        text = f"{scheme}://***@{rest}" if slashes else f"***@{rest}"
    return _SECRET.sub(r"\1***", text)


def check_store_url(value: object) -> str:
    """`value`, if it has the form of a store's URL.

    Raises ValueError with the reason, which never holds a part of the URL: it may be a password.
    """
    if not isinstance(value, str) or not value:
        raise ValueError("empty" if value == "" else "no text")
    scheme, slashes, rest = value.partition("://")
    if not slashes or scheme not in SCHEMES:
        raise ValueError("of no scheme known here")
    if re.search(r"[\x00-\x20\x7f]", value):
        raise ValueError("holding a space or control character")
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    # Only the last "@" ends the credentials: a password may hold one that isn't escaped.
    place = place.rpartition("@")[2]
    if scheme == "memory":
        if rest:
            raise ValueError("followed by something; memory:// stands alone")
        return value
    hosts, _, path = place.partition("/")
    if scheme == "unix":
        if hosts or not path:
            raise ValueError("without the absolute path of a socket: unix:///run/redis.sock")
        return value
    _check_hosts(hosts, several=scheme in SEVERAL)
    parts = path.strip("/").split("/") if path.strip("/") else []
    if scheme.endswith("+sentinel"):
        if not parts:
            raise ValueError("without the service's name: redis+sentinel://h1,h2/service")
        parts = parts[1:]
    if len(parts) > 1 or any(not part.isdecimal() for part in parts):
        raise ValueError("with a path that is no database number")
    if scheme.endswith("+cluster") and any(int(part) for part in parts):
        raise ValueError("with a database number; a cluster has only 0")
    return value


def _check_hosts(hosts: str, *, several: bool) -> None:
    names = hosts.split(",")
    if len(names) > 1 and not several:
        raise ValueError("with several hosts; use redis+sentinel:// or redis+cluster://")
    for name in names:
        match = _HOST.fullmatch(name)
        if match is None or int(match[2] or 1) not in range(1, 65536):
            raise ValueError("without a host, or with a port that is none")
