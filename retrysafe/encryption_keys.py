"""The keys that stored results are encrypted with: how they are written, checked and told apart.

Nothing here shows a key: not in `repr`, not in an error.
"""

from __future__ import annotations

import base64
import binascii
import re
from hashlib import blake2b

__all__ = ["KEYS_FORM", "PLAIN", "EncryptionKeys"]

KEYS_FORM = (
    "keys with commas between, each 32 random bytes as base64 or hex (openssl rand -base64 32); "
    "the first encrypts, all decrypt; the word plain stands for results that are not encrypted"
)
PLAIN = "plain"
KEY_SIZE = 32
ID_SIZE = 4
# 32 random bytes hold fewer different ones with a probability below 1e-26: it was typed.
_FEWEST_DIFFERENT = 12

_HEX = re.compile(r"[0-9A-Fa-f]{64}", re.ASCII)
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}", re.ASCII)


class EncryptionKeys:
    """A ring of keys, from the text of `RETRYSAFE_ENCRYPTION_KEYS`.

    The first one encrypts, all of them decrypt: a new key is put in front, the old one leaves when
    what it has encrypted has expired. The word `plain` in the ring lets results be read that are
    not encrypted; in front, it says that new ones are not (`plain,<key>` before a roll-out).

    Raises ValueError with the reason, which never holds a part of a key.
    """

    __slots__ = ("_keys", "reads_plain", "writes_plain")

    def __init__(self, text: str) -> None:
        parts = [part.strip() for part in text.split(",")]
        keys = [
            _key(part, f"key {number}")
            for number, part in enumerate(parts, start=1)
            if part != PLAIN
        ]
        if not keys:
            raise ValueError("without a key; unset it to store results as they are")
        if len(set(keys)) < len(keys) or parts.count(PLAIN) > 1:
            raise ValueError("with a key that comes twice")
        self._keys = {_id(key): key for key in keys}
        if len(self._keys) < len(keys):
            raise ValueError("with two keys whose IDs are alike; make a new one")
        self.reads_plain = PLAIN in parts
        self.writes_plain = parts[0] == PLAIN

    @property
    def first(self) -> tuple[bytes, bytes]:
        """The ID and the bytes of the key that encrypts."""
        return next(iter(self._keys.items()))

    def by_id(self, name: bytes) -> bytes | None:
        """The key with this ID, None where the ring has none."""
        return self._keys.get(name)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, EncryptionKeys)
            and list(self._keys) == list(other._keys)
            and (self.reads_plain, self.writes_plain) == (other.reads_plain, other.writes_plain)
        )

    def __hash__(self) -> int:
        return hash(tuple(self._keys))

    def __repr__(self) -> str:
        return f"EncryptionKeys({', '.join(name.hex() for name in self._keys)})"


def _id(key: bytes) -> bytes:
    """What names a key in records and messages. It tells nothing about a random key."""
    return blake2b(key, digest_size=ID_SIZE, person=b"retrysafe-keyid").digest()


def _key(text: str, which: str) -> bytes:
    if not text:
        raise ValueError(f"{which} is empty")
    if _HEX.fullmatch(text):
        key = bytes.fromhex(text)
    elif _BASE64.fullmatch(text):
        plain = text.rstrip("=").replace("-", "+").replace("_", "/")
        try:
            key = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        except binascii.Error:
            raise ValueError(f"{which} is cut or mistyped") from None
    else:
        raise ValueError(f"{which} is neither base64 nor hex")
    if len(key) != KEY_SIZE:
        raise ValueError(f"{which} has {len(key)} bytes in place of {KEY_SIZE}")
    if len(set(key)) < _FEWEST_DIFFERENT:
        raise ValueError(f"{which} is not random")
    return key
