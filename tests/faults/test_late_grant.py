"""A receipt that is granted, but whose owner hears of it when its lease is over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from retrysafe import errors
from retrysafe.receipts import AsyncHeld, AsyncReceipts, Held, Receipts
from retrysafe.records import Record
from retrysafe.stores.redis import RedisStore
from tests.conftest import OwnServer
from tests.faults.proxy import Proxy
from tests.receipting import CALL, held, policy
from tests.servers import Server
from tests.support import run, until, wait_until

LEASE = 0.6


@pytest.fixture
def server(own_server: OwnServer) -> Server:
    return own_server()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as made:
        yield made


def begun(server: Server) -> bool:
    with server.client() as client:
        return bool(list(client.scan_iter("*:r:*")))


def test_an_owner_that_hears_too_late_does_not_work_beside_its_successor(
    server: Server, proxy: Proxy
) -> None:
    async def main() -> None:
        late = AsyncReceipts(RedisStore(proxy.url, "t"), policy(lease=LEASE, wait=10))
        other = AsyncReceipts(RedisStore(server.url, "t"), policy(lease=LEASE, wait=10))
        await (await held(late)).release()  # the connection stands, the script is known
        proxy.hold(("replies",))
        first = asyncio.create_task(late.begin(CALL))
        await until(lambda: begun(server))
        second = await held(other)  # once the lease is over
        proxy.resume()
        done, _ = await asyncio.wait([first], timeout=0.3)
        assert not done, "it was told that the receipt is its own"
        await second.finish(b"theirs", 60)
        answer = await first
        assert isinstance(answer, Record)
        assert answer.payload == b"theirs"

    run(main())


def test_a_thread_that_hears_too_late_does_not_work_beside_its_successor(
    server: Server, proxy: Proxy
) -> None:
    late = Receipts(RedisStore(proxy.url, "t"), policy(lease=LEASE, wait=10))
    other = Receipts(RedisStore(server.url, "t"), policy(lease=LEASE, wait=10))
    warm = late.begin(CALL)  # the connection stands, the script is known
    assert isinstance(warm, Held)
    warm.release()
    proxy.hold(("replies",))
    heard = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(late.begin, CALL)
        first.add_done_callback(lambda done: heard.set())
        wait_until(lambda: begun(server))
        second = other.begin(CALL)
        assert isinstance(second, Held)
        proxy.resume()
        assert not heard.wait(0.3), "it was told that the receipt is its own"
        second.finish(b"theirs", 60)
        answer = first.result(10)
    assert isinstance(answer, Record)
    assert answer.payload == b"theirs"


def test_a_late_owner_without_a_successor_has_a_whole_lease(server: Server, proxy: Proxy) -> None:
    async def main() -> None:
        late = AsyncReceipts(RedisStore(proxy.url, "t"), policy(lease=LEASE))
        await (await held(late)).release()  # the connection stands, the script is known
        proxy.hold(("replies",))
        first = asyncio.create_task(late.begin(CALL))
        await until(lambda: begun(server))
        await asyncio.sleep(LEASE)
        proxy.resume()
        mine = await first
        assert isinstance(mine, AsyncHeld)
        other = AsyncReceipts(RedisStore(server.url, "t"), policy(lease=LEASE, wait=0))
        with pytest.raises(errors.InFlight):
            await other.begin(CALL)
        assert await mine.finish(b"mine", 60) is None

    run(main())


def test_a_path_slower_than_the_lease_is_refused_and_leaves_no_receipt(
    server: Server, proxy: Proxy
) -> None:
    async def main() -> None:
        late = AsyncReceipts(RedisStore(proxy.url, "t"), policy(lease=0.15))
        await (await held(late)).release()  # the connection stands, the script is known
        proxy.delay_replies(0.4)
        with pytest.raises(errors.StoreUnavailable):
            await late.begin(CALL)
        proxy.delay_replies(0)
        await until(lambda: not begun(server))

    run(main())
