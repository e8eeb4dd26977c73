"""Commands as Redis speaks them: script, key and arguments; and the replies back."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

from retrysafe import commands as c
from retrysafe.commands import Answer, Reply
from retrysafe.errors import StoreUnavailable
from retrysafe.records import short

# What is put before a script: the function that wakes waiters, or reads a receipt at work.
_BEFORE = {
    **dict.fromkeys(("finish", "release", "interrupt", "forget"), "wake"),
    **dict.fromkeys(("begin", "look", "peek"), "running"),
}


# Read here, not at the first call: a child that is forked while another thread loads something
# would wait for that thread, which it doesn't have, without end.
_TEXTS = {
    each.name.removesuffix(".lua"): each.read_bytes()
    for each in resources.files("retrysafe.stores").joinpath("lua").iterdir()
}


def _text(name: str) -> bytes:
    return _TEXTS[name]


@cache
def script(name: str) -> tuple[bytes, bytes]:
    """A script's text and its SHA-1, as EVAL and EVALSHA take them."""
    text = (_text(_BEFORE[name]) if name in _BEFORE else b"") + _text(name)
    return text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()


_ANSWERS = {answer.value: answer for answer in Answer}
_SHORT = re.compile(rb"r1[0-9]([0-9]{16})?")


class Wire:
    """The names of one namespace."""

    def __init__(self, namespace: str) -> None:
        self.receipts = f"{namespace}:r:".encode()
        self.inboxes = f"{namespace}:i:".encode()
        self.forgotten = self.inboxes + b"forgotten"  # no inbox: those have 16 bytes

    def pack(self, command: c.Command) -> tuple[str, bytes, tuple[bytes | int | str, ...]]:
        """The script's name, its key, its arguments."""
        key = self.receipts + command.key.hex().encode()
        match command:
            case c.Begin():
                return (
                    "begin",
                    key,
                    (
                        command.token,
                        command.fingerprint,
                        command.lease_us,
                        command.ttl_ms,
                        command.inbox,
                        b"1" if command.take_over else b"0",
                        short(command.request_id),
                    ),
                )
            case c.Finish():
                return (
                    "finish",
                    key,
                    (
                        command.token,
                        command.value,
                        command.ttl_ms,
                        self.inboxes,
                        c.NUDGE_LIMIT,
                        command.key,
                    ),
                )
            case c.Renew():
                return "renew", key, (command.token, command.lease_us, command.ttl_ms)
            case c.Release():
                return "release", key, (command.token, self.inboxes, command.key)
            case c.Interrupt():
                return "interrupt", key, (command.token, self.inboxes, command.key)
            case c.Forget():
                return "forget", key, (self.inboxes, command.key, self.forgotten)
            case c.Look():
                return "look", key, ()

    @staticmethod
    def unpack(raw: Any) -> Reply:
        """A script's reply: {answer, number, value}; shorter, `r1`, the answer and, where it has
        one, a number of 16 digits. Raises StoreUnavailable for what is none: nothing is read into
        it.
        """
        try:
            if type(raw) is bytes:
                short = _SHORT.fullmatch(raw)
                if short is not None:
                    return Reply(_ANSWERS[raw[2] - 48], int(short[1] or 0))
            answer, number, value = raw
            if type(answer) is int and type(number) is int and type(value) is bytes:
                return Reply(_ANSWERS[answer], number, value)
        except (TypeError, ValueError, KeyError):
            pass
        raise StoreUnavailable(reason="the server's reply is none of a script of ours")
