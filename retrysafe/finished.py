"""Finished records of one event loop, kept at hand: a replay from here asks nobody.

A finished receipt never changes within its TTL; only a `forget` ends it early, and that is told
on one channel to whoever keeps records. Nothing is kept while that channel isn't heard. What a
lost message, or a key deleted by other means, can do is bounded by `MAX_AGE`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from retrysafe.records import Record

# All seconds that a record is at hand: as long as a forgotten one may still answer, in a process
# that has lost its connection without noticing yet.
MAX_AGE = 10.0
# Bytes of all records; one that is larger than its share is fetched each time.
LIMIT = 8 << 20
LARGEST = 64 << 10
_OVERHEAD = 500  # of an entry, besides its payload


class FinishedRecords:
    """Belongs to one event loop. Times are of the caller's monotonic clock.

    `wanted` is called when a record could be kept, if only forgets were heard.
    """

    def __init__(self, wanted: Callable[[], object] = lambda: None) -> None:
        self.heard = False
        self.changes = 0
        self._wanted = wanted
        self._found: OrderedDict[bytes, tuple[Record, float, int]] = OrderedDict()
        self._size = 0

    def get(self, digest: bytes, now: float) -> Record | None:
        """The record that answers the receipt's replays; None: ask the store."""
        found = self._found.get(digest)
        if found is None:
            return None
        record, ends, _ = found
        if now >= ends:
            self._drop(digest)
            return None
        self._found.move_to_end(digest)
        return record

    def keep(self, digest: bytes, record: Record, asked: float, ttl: float, changes: int) -> None:
        """Keep what the store answered. `asked` and `changes` are of before it was asked: what
        was forgotten since may be this very record. `ttl`: seconds it has left in the store."""
        size = _OVERHEAD + len(record.payload or b"")
        if size > LARGEST:
            return
        if not self.heard:
            self._wanted()
            return
        if changes != self.changes:
            return
        self._drop(digest)
        self._found[digest] = (record, asked + min(ttl, MAX_AGE), size)
        self._size += size
        while self._size > LIMIT:
            self._drop(next(iter(self._found)))

    def forget(self, digest: bytes | None) -> None:
        """A receipt was forgotten; None: any of them may have been."""
        self.changes += 1
        if digest is not None:
            self._drop(digest)
            return
        self._found.clear()
        self._size = 0

    def _drop(self, digest: bytes) -> None:
        found = self._found.pop(digest, None)
        if found is not None:
            self._size -= found[2]
