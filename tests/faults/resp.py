"""Where values end in a stream of RESP, the protocol of Redis (versions 2 and 3)."""

from __future__ import annotations

_LINES = b"+-:_#,("
_STRINGS = b"$!="
_PARTS = {ord("*"): 1, ord("~"): 1, ord(">"): 1, ord("%"): 2, ord("|"): 2}
"""How many values one counted entry of an aggregate has."""


def end_of(data: bytes | bytearray, start: int = 0) -> int | None:
    """The index after the value that begins at `start`; None while a part of it is missing."""
    line = data.find(b"\r\n", start)
    if line < 0:
        return None
    kind, after = data[start], line + 2
    if kind in _LINES:
        return after
    size = int(data[start + 1 : line])
    if kind in _STRINGS:
        end = after if size < 0 else after + size + 2
        return end if end <= len(data) else None
    values = max(size, 0) * _PARTS[kind]
    if kind == ord("|"):
        values += 1  # attributes stand before the value they belong to
    for _ in range(values):
        found = end_of(data, after)
        if found is None:
            return None
        after = found
    return after


def command_end(data: bytes | bytearray) -> int | None:
    """The same for what a client sends, which may also be an inline command (a line)."""
    if not data or data[:1] == b"*":
        return end_of(data)
    line = data.find(b"\n")
    return None if line < 0 else line + 1


def command_name(command: bytes) -> str:
    """The first word of a command, in capitals."""
    if command[:1] != b"*":
        return command.split(None, 1)[0].decode().upper() if command.strip() else ""
    _, _, name, _ = command.split(b"\r\n", 3)
    return name.decode().upper()


def answers_a_command(reply: bytes) -> bool:
    """False for what a server sends unasked: the messages of channels, and RESP3's other pushes."""
    if reply[:1] not in (b"*", b">"):
        return True
    kind = reply.split(b"\r\n", 3)[2:3]
    if reply[:1] == b"*":
        return kind not in ([b"message"], [b"pmessage"], [b"smessage"])
    return bool(kind) and kind[0].endswith(b"subscribe")
