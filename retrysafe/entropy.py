"""Random bytes of the operating system, drawn by the page: a system call for each would be a
twentieth of a keyed call."""

from __future__ import annotations

import os
import threading

_PAGE = 4096
_lock = threading.Lock()
_page = b""
_at = 0


def random_bytes(count: int) -> bytes:
    """`count` bytes, at most a page, that nobody can guess and no other call gets."""
    global _page, _at
    with _lock:
        end = _at + count
        if end > len(_page):
            _page, _at, end = os.urandom(_PAGE), 0, count
        drawn = _page[_at:end]
        _at = end
    return drawn


def _after_fork() -> None:
    """Two children must not draw from one page."""
    global _lock, _page
    _lock = threading.Lock()
    _page = b""


os.register_at_fork(after_in_child=_after_fork)
