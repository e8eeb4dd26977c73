"""Results encrypted before they reach the store, and opened on their way back.

Sagas seal their documents themselves (`retrysafe.saga_state`): no script reads in them.

The payload of a finished receipt is sealed by AES-256-GCM; its head (state, owner token, fence,
fingerprint, request ID) stays readable, since the store's scripts work on it, and is authenticated
with the payload. So is the receipt's digest: a record that is changed, or moved to another
receipt, can't be opened.

    0xC1 "sealed1" · 4 ID of the key · 12 nonce · ciphertext · 16 tag

0xC1 begins no msgpack and no result of ours, so a process without keys reads none of it as a
result. Each receipt has a key of its own, derived from the ring's by its digest: the limit of
2**32 random nonces under one key (NIST SP 800-38D, 8.3) is that of one receipt, not of all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from retrysafe.commands import Command, Finish, Reply
from retrysafe.encryption_keys import ID_SIZE, KEY_SIZE, EncryptionKeys
from retrysafe.errors import RecordSealed, SettingsError
from retrysafe.events import Event, emit
from retrysafe.records import SEALED, CorruptRecord, payload_at
from retrysafe.settings import PREFIX, Settings
from retrysafe.stores.base import AsyncBackend, Backend, OnMessage, OnNews, Store
from retrysafe.values import replace

_VARIABLE = f"{PREFIX}ENCRYPTION_KEYS"
_NONCE_SIZE = 12
_NONCE_AT = len(SEALED) + ID_SIZE
_TEXT_AT = _NONCE_AT + _NONCE_SIZE


def sealed(store: Store) -> Store:
    """`store`, or what encrypts its results where RETRYSAFE_ENCRYPTION_KEYS is set."""
    keys = Settings.from_env().encryption_keys
    return store if keys is None else SealedStore(store, keys)


class SealedStore:
    """A store whose results are encrypted. `keys`: EncryptionKeys, or their text.

    A record that can't be opened is never answered, never overwritten, and its work is not run
    again: RecordSealed is raised, which says why. Raises SettingsError without the library
    `cryptography` (the extra `encryption`).
    """

    def __init__(self, store: Store, keys: EncryptionKeys | str) -> None:
        self.store = store
        self.namespace = store.namespace
        self.url = store.url
        self.seal = Seal(EncryptionKeys(keys) if isinstance(keys, str) else keys)

    def open(self) -> Backend:
        return SealedBackend(self.store.open(), self.seal)

    def open_async(self) -> AsyncBackend:
        return AsyncSealedBackend(self.store.open_async(), self.seal)

    def __repr__(self) -> str:
        return f"SealedStore({self.store!r})"


class Seal:
    """What seals and opens the values of finished receipts. Safe to share between threads."""

    __slots__ = ("_cipher", "_keys", "_tampered")

    def __init__(self, keys: EncryptionKeys) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise SettingsError(
                [
                    f"{_VARIABLE} is set, and the library that encrypts is not installed: "
                    "pip install 'retrysafe[encryption]'"
                ]
            ) from None
        self._cipher = AESGCM
        self._tampered = InvalidTag
        self._keys = keys

    def close(self, digest: bytes, value: bytes) -> bytes:
        """A finished receipt's value with its payload sealed; one without a payload as it is."""
        at = payload_at(value)
        if at is None:
            return value
        return value[:at] + self.close_text(digest, value[:at], value[at:])

    def open(self, digest: bytes, value: bytes) -> bytes:
        """The value with its payload in the open; whatever has no payload, as it is.

        Raises RecordSealed.
        """
        try:
            at = payload_at(value)
        except CorruptRecord:
            return value  # the flow says so
        if at is None:
            return value
        return value[:at] + self.open_text(digest, value[:at], value[at:])

    def close_text(self, digest: bytes, head: bytes, text: bytes) -> bytes:
        """A text sealed, or as it is while the ring says so. `head` is what stands before it."""
        if self._keys.writes_plain and not text.startswith(SEALED):
            return text
        name, key = self._keys.first
        nonce = os.urandom(_NONCE_SIZE)
        return b"".join(
            (SEALED, name, nonce, self._for(key, digest).encrypt(nonce, text, digest + head))
        )

    def open_text(self, digest: bytes, head: bytes, text: bytes) -> bytes:
        """What `close_text` made of it. Raises RecordSealed."""
        if not text.startswith(SEALED):
            if self._keys.reads_plain:
                return text
            raise RecordSealed(
                digest.hex(),
                f"it is not encrypted, and {_VARIABLE} does not list the word plain",
            )
        name = text[len(SEALED) : _NONCE_AT]
        key = self._keys.by_id(name)
        if key is None:
            raise RecordSealed(
                digest.hex(), f"it is encrypted with the key {name.hex()}, not one of {_VARIABLE}"
            )
        nonce = text[_NONCE_AT:_TEXT_AT]
        try:
            opened = self._for(key, digest).decrypt(nonce, text[_TEXT_AT:], digest + head)
        except (self._tampered, ValueError):  # ValueError: cut inside the nonce
            raise RecordSealed(
                digest.hex(), "its seal is broken: it was changed, or is another receipt's"
            ) from None
        return bytes(opened)

    def outbound(self, command: Command) -> Command:
        """A command as it goes to the store."""
        if not isinstance(command, Finish):
            return command
        return replace(command, value=self.close(command.key, command.value))

    def inbound(self, command: Command, reply: Reply) -> Reply:
        """A reply as it comes from the store. Raises RecordSealed."""
        if not reply.value:
            return reply
        try:
            value = self.open(command.key, reply.value)
        except RecordSealed as error:
            emit(Event("record-corrupt", error.key, detail=error.reason))
            if isinstance(command, Finish):
                # The work is done: that another's record can't be read takes no answer away.
                return replace(reply, value=b"")
            raise
        return reply if value is reply.value else replace(reply, value=value)

    def hearing(self, on_message: OnMessage) -> OnMessage:
        """An inbox whose records are opened; for one that can't be, its waiter looks again."""

        def on_sealed(digest: bytes, value: bytes) -> None:
            try:
                value = self.open(digest, value) if value else value
            except RecordSealed:
                value = b""
            on_message(digest, value)

        return on_sealed

    def _for(self, key: bytes, digest: bytes) -> Any:
        """The cipher of one receipt."""
        own = blake2b(digest, key=key, digest_size=KEY_SIZE, person=b"retrysafe-seal")
        return self._cipher(own.digest())


class SealedBackend:
    """The sync door of a SealedStore."""

    def __init__(self, door: Backend, seal: Seal) -> None:
        self._door = door
        self._seal = seal

    def execute(self, command: Command, end: float | None = None) -> Reply:
        return self._seal.inbound(command, self._door.execute(self._seal.outbound(command), end))

    def execute_many(self, commands: Sequence[Command]) -> list[Reply | Exception]:
        replies = self._door.execute_many([self._seal.outbound(each) for each in commands])
        return _each(self._seal, commands, replies)

    def listen(self, inbox: bytes, on_message: OnMessage, limit: float) -> bool:
        return self._door.listen(inbox, self._seal.hearing(on_message), limit)

    def eval(
        self, script: str, keys: Sequence[str], args: Sequence[Any], end: float | None = None
    ) -> Any:
        return self._door.eval(script, keys, args, end)

    def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        return self._door.subscribe(channel, on_news, limit)

    def unsubscribe(self, channel: bytes) -> None:
        self._door.unsubscribe(channel)

    def close(self) -> None:
        self._door.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)


class AsyncSealedBackend:
    """The async door of a SealedStore."""

    def __init__(self, door: AsyncBackend, seal: Seal) -> None:
        self._door = door
        self._seal = seal

    @property
    def forgotten(self) -> bytes | None:
        return self._door.forgotten

    async def execute(self, command: Command) -> Reply:
        return self._seal.inbound(command, await self._door.execute(self._seal.outbound(command)))

    async def execute_many(self, commands: Sequence[Command]) -> list[Reply | Exception]:
        replies = await self._door.execute_many([self._seal.outbound(each) for each in commands])
        return _each(self._seal, commands, replies)

    async def listen(self, inbox: bytes, on_message: OnMessage, limit: float) -> bool:
        return await self._door.listen(inbox, self._seal.hearing(on_message), limit)

    async def eval(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._door.eval(script, keys, args)

    async def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        return await self._door.subscribe(channel, on_news, limit)

    def unsubscribe(self, channel: bytes) -> None:
        self._door.unsubscribe(channel)

    async def close(self) -> None:
        await self._door.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)


def _each(
    seal: Seal, commands: Sequence[Command], replies: Sequence[Reply | Exception]
) -> list[Reply | Exception]:
    answers: list[Reply | Exception] = []
    for command, reply in zip(commands, replies, strict=True):
        try:
            answers.append(seal.inbound(command, reply) if isinstance(reply, Reply) else reply)
        except RecordSealed as error:
            answers.append(error)
    return answers
