"""Sagas on a store that encrypts: what lies there, who goes on with them, and who can't."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis

from retrysafe import Fixed, RetryPolicy, Saga, keys
from retrysafe.errors import RecordSealed, SagaFailed
from retrysafe.records import SEALED
from retrysafe.stores import Store
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.sealed import SealedStore
from tests.stores.test_sealed import NEW, OLD
from tests.support import wait_until

CANARY = "canary-7d1f"


class Shop:
    """A saga of two steps; the undo of the first one is not due at once, so that others find it."""

    def __init__(self, store: Store) -> None:
        self.undone: list[Any] = []
        self.busy = True
        self.saga = Saga(
            "shop",
            store,
            undo_backoff=Fixed(0.2),
            undo_attempts=50,
            stay=0,
            retry=RetryPolicy(attempts=1, deadline=5),
        )
        self.saga.step(name="pay", undo=self._refund)(self._pay)
        self.saga.step(name="ship", undo=self._return)(self._ship)

    def _pay(self, ctx: Any, order: str) -> dict[str, str]:
        return {"paid": order}

    def _refund(self, ctx: Any, data: Any) -> None:
        if self.busy:
            raise RuntimeError("the bank is busy")
        self.undone.append(data)

    def _ship(self, ctx: Any, order: str) -> None:
        raise Refused("no stock")

    def _return(self, ctx: Any, data: Any) -> None: ...

    def fail(self, id: str) -> None:
        """Run it, so that its undo is left to whoever comes."""
        with pytest.raises(SagaFailed) as failed:
            self.saga.run_sync(id, f"{CANARY}-{id}")
        assert failed.value.pending == ("pay",)

    def recovered(self) -> list[Any]:
        """What recovery comes to, once it is due."""
        self.busy = False
        found: list[Any] = []

        def some() -> bool:
            found[:] = self.saga.recover_sync()
            return bool(found)

        wait_until(some)
        return found


class Refused(Exception):
    retryable = False


def key_of(store: Store, id: str) -> str:
    return f"{store.namespace}:saga:shop:{keys.digest(store.namespace, 'saga:shop', id).hex()}"


def paper(store: Store, id: str = "1") -> bytes:
    """The document as it lies in the store."""
    reply = store.open().eval("saga_look", [key_of(store, id)], (0,))
    return bytes(reply[2])


def test_a_sagas_document_lies_encrypted_and_another_process_goes_on_with_it(store: Store) -> None:
    Shop(SealedStore(store, NEW)).fail("1")
    assert paper(store).startswith(SEALED) and CANARY.encode() not in paper(store)
    heir = Shop(SealedStore(store, NEW))
    (info,) = heir.recovered()
    assert (info.status, info.undone) == ("undone", ("pay",))
    assert heir.undone == [{"paid": f"{CANARY}-1"}]


def test_a_key_is_rotated_under_an_unfinished_saga(store: Store) -> None:
    Shop(SealedStore(store, OLD)).fail("1")
    heir = Shop(SealedStore(store, f"{NEW},{OLD}"))
    assert [info.status for info in heir.recovered()] == ["undone"]
    assert Shop(SealedStore(store, NEW)).saga.look_sync("1").status == "undone"


@pytest.mark.parametrize("ring", [None, OLD])
def test_without_its_key_a_saga_is_named_left_alone_and_undone_by_who_has_it(
    store: Store, ring: str | None
) -> None:
    owner = Shop(SealedStore(store, NEW))
    owner.fail("1")
    stranger = Shop(store if ring is None else SealedStore(store, ring))
    (info,) = stranger.saga.unfinished_sync()
    assert "encrypted" in info.problem and stranger.undone == []
    (info,) = stranger.recovered()
    assert "encrypted" in info.problem and stranger.undone == []
    with pytest.raises(RecordSealed):
        stranger.saga.run_sync("1", f"{CANARY}-1")
    assert stranger.undone == []
    owner.busy = False
    with pytest.raises(SagaFailed) as failed:
        owner.saga.resume_sync("1")
    assert failed.value.undone == ("pay",)


def test_a_document_under_another_sagas_name_is_not_opened(redis_url: str) -> None:
    store = RedisStore(redis_url, "tests")
    shop = Shop(SealedStore(store, NEW))
    shop.fail("1")
    shop.fail("2")
    with Redis.from_url(redis_url) as client:
        client.hset(key_of(store, "2"), "d", paper(store, "1"))
    with pytest.raises(RecordSealed, match="seal is broken"):
        shop.saga.resume_sync("2")


def test_encryption_is_switched_on_under_an_unfinished_saga(store: Store) -> None:
    """Written in the open, read by the ring that lists `plain`, and encrypted from then on."""
    Shop(store).fail("1")
    heir = Shop(SealedStore(store, f"{NEW},plain"))
    assert [info.status for info in heir.recovered()] == ["undone"]
    assert paper(store).startswith(SEALED)
