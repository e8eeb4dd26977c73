"""Idempotency keys: their syntax, and the digests that stand for them everywhere else.

The rest of the engine never handles a caller's key as a name: it is hashed together with the
namespace and the scope, so neither its characters nor its length matter to a store, and no two
callers can meet. Fingerprints (`retrysafe.fingerprints`) and the encoding of arguments
(`retrysafe.canonical`) are named here too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

from retrysafe.canonical import canonical
from retrysafe.errors import KeyInvalid
from retrysafe.fingerprints import (
    NO_FINGERPRINT,
    RequestFingerprint,
    fingerprint,
    json_fingerprint,
)

__all__ = [
    "DIGEST_SIZE",
    "MAX_KEY_LENGTH",
    "NO_FINGERPRINT",
    "RequestFingerprint",
    "canonical",
    "check_key",
    "derive",
    "digest",
    "fingerprint",
    "json_fingerprint",
    "parse_key",
]

MAX_KEY_LENGTH = 255
DIGEST_SIZE = 16
_DERIVED_SIZE = 20
_STRANGE = re.compile("[^!-~]")
_KEYS = blake2b(digest_size=DIGEST_SIZE, person=b"retrysafe-key")


def parse_key(values: Sequence[bytes | str]) -> str:
    """The key that the values of the key header say, one value per header line.

    Takes the quoted form (RFC 9651 String, as the Idempotency-Key draft has it) and the bare form
    that most clients send; both forms of one text are one key. Raises KeyInvalid for anything
    else: two lines, parameters after the key, unbalanced quotes, and what `check_key` refuses.
    """
    if not values:
        raise KeyInvalid("there is none")
    if len(values) > 1:
        raise KeyInvalid("the header came more than once; send one key")
    value = values[0]
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    text = text.strip(" \t")
    if text.startswith('"'):
        text = _unquoted(text)
    elif '"' in text:
        raise KeyInvalid('it has a stray quote; send it bare, or quoted on both sides: "key"')
    return check_key(text)


def _unquoted(text: str) -> str:
    out: list[str] = []
    at = 1
    while at < len(text):
        char = text[at]
        if char == '"':
            if text[at + 1 :]:
                raise KeyInvalid("something follows the closing quote; send the key alone")
            return "".join(out)
        if char == "\\":
            at += 1
            if at == len(text) or text[at] not in '"\\':
                raise KeyInvalid('a backslash in a quoted key may only precede " or \\')
            char = text[at]
        out.append(char)
        at += 1
    raise KeyInvalid("the closing quote is missing")


def check_key(text: str) -> str:
    """Return `text` if it can be a key: 1-255 visible ASCII characters (0x21-0x7E).

    Raises KeyInvalid, which never repeats the key: it may be a secret.
    """
    if not text:
        raise KeyInvalid("it is empty")
    if len(text) > MAX_KEY_LENGTH:
        raise KeyInvalid(
            f"it has {len(text)} characters; a key has at most {MAX_KEY_LENGTH}: "
            "send an ID or a digest"
        )
    strange = _STRANGE.search(text)
    if strange is not None:
        raise KeyInvalid(
            f"character {strange.start() + 1} is U+{ord(strange[0]):04X}; "
            "a key is made of visible ASCII characters, without spaces"
        )
    return text


def digest(namespace: str, scope: str, key: str) -> bytes:
    """The 16 bytes that name a receipt. Parts are length-prefixed: no two triples meet."""
    hasher = _KEYS.copy()
    space = namespace.encode("utf-8", "surrogatepass")
    caller = scope.encode("utf-8", "surrogatepass")
    name = key.encode("utf-8", "surrogatepass")
    hasher.update(b"%d:%b%d:%b%d:%b" % (len(space), space, len(caller), caller, len(name), name))
    return hasher.digest()


def derive(key_digest: bytes | str, *parts: str | int) -> str:
    """The key of a call or step made inside keyed work: 40 hex digits, the same on each re-run.

    `key_digest` is the work's digest (bytes or hex); `parts` say which call it is, such as its
    name and its number in order. `1` and `"1"` are different parts.
    """
    data = bytes.fromhex(key_digest) if isinstance(key_digest, str) else key_digest
    hasher = blake2b(digest_size=_DERIVED_SIZE, person=b"retrysafe-derive")
    hasher.update(b"%d:" % len(data))
    hasher.update(data)
    for part in parts:
        hasher.update(canonical(part))
    return hasher.hexdigest()
