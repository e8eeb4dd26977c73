"""How many receipts one caller may have: `max_receipts`, on both stores."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from retrysafe.commands import Command, Release, Reply
from retrysafe.errors import SettingsError, StoreUnavailable
from retrysafe.events import Event, listening
from retrysafe.keys import digest
from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.middleware.callers import Counted
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import AsyncReceipts, Call
from retrysafe.settings import Settings
from retrysafe.stores import Store
from retrysafe.stores.cluster import ClusterStore
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.sealed import SealedStore
from tests.asgi import Answer, post
from tests.conftest import OwnServer
from tests.middleware.test_idempotency import App, problem, wrapped
from tests.receipting import held, policy
from tests.servers import Cluster
from tests.stores.test_acl import PASSWORD, rules
from tests.stores.test_sealed import NEW
from tests.support import run


def of_header(request: Request) -> str:
    return request.headers.get("caller", "alice")


def limited(app: Any, store: Store, most: int = 2, **options: Any) -> IdempotencyMiddleware:
    chosen = IdempotencyPolicy(max_receipts=most, **options)
    return wrapped(app, store, policy=chosen, scope=of_header)


def is_refused(answer: Answer) -> bool:
    return answer.status == 429


def test_one_more_than_a_caller_may_have_is_answered_429_and_not_run(store: Store) -> None:
    told: list[Event] = []

    async def main() -> None:
        app = App()
        target = limited(app, store)
        for key in ("1", "2"):
            assert (await post(target, key=key)).status == 201
        with listening(told.append):
            answer = await post(target, key="3")
        assert app.runs == 2
        assert is_refused(answer)
        said = problem(answer)
        assert said["type"] == "urn:retrysafe:problem:too-many-receipts"
        assert said["retryable"] is True
        assert answer.header("should-retry") == "true"
        after = answer.header("retry-after")
        assert after is not None
        assert 86_000 < int(after) <= 86_400  # when the first of them has expired
        # Nothing of it is left: without the limit the key is as new.
        assert not (await post(wrapped(app, store, scope=of_header), key="3")).replayed

    run(main())
    assert [each.kind for each in told if each.kind == "too-many-receipts"] == ["too-many-receipts"]


def test_what_was_begun_is_answered_however_many_there_are(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = limited(app, store, most=1)
        first = await post(target, key="1")
        assert is_refused(await post(target, key="2"))
        again = await post(target, key="1")
        assert again.replayed
        assert again.body == first.body

    run(main())


def test_each_caller_has_a_limit_of_its_own(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = limited(app, store, most=1)
        for caller in ("alice", "bob"):
            headers = [("caller", caller)]
            assert (await post(target, key="1", headers=headers)).status == 201
            assert is_refused(await post(target, key="2", headers=headers))

    run(main())


@pytest.mark.parametrize("status", [400, 500])
def test_a_request_whose_receipt_is_released_is_counted_no_more(store: Store, status: int) -> None:
    async def main() -> None:
        app = App(status=status)
        target = limited(app, store, most=2)
        for n in range(5):
            assert (await post(target, key=f"failed-{n}")).status == status
        app.status = 201
        for key in ("failed-0", "1"):
            assert (await post(target, key=key)).status == 201
        assert is_refused(await post(target, key="2"))

    run(main())


async def room_again(target: Any, key: str) -> list[Answer]:
    """Answers to one request, until it is not refused any more."""
    answers = [await post(target, key=key)]
    async with asyncio.timeout(10):
        while is_refused(answers[-1]):
            await asyncio.sleep(0.02)
            answers.append(await post(target, key=key))
    return answers


def test_it_is_counted_for_as_long_as_its_result_is_kept(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = limited(app, store, most=1, ttl=lambda status: 1.0)
        assert (await post(target, key="1")).status == 201
        answers = await room_again(target, "2")
        assert is_refused(answers[0])
        assert answers[-1].status == 201

    run(main())


def test_there_is_room_again_when_receipts_have_expired(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = limited(app, store, most=1, ttl=1.0, wait=0.1, lease=0.4)
        assert (await post(target, key="1")).status == 201
        answers = await room_again(target, "2")
        assert is_refused(answers[0])
        assert answers[-1].status == 201
        assert app.runs == 2

    run(main())


def test_a_shorter_ttl_forgets_nothing_that_lasts_longer(store: Store) -> None:
    async def main() -> None:
        app = App()
        assert (await post(limited(app, store, most=1), key="1")).status == 201
        brief = limited(app, store, most=2, ttl=0.2, wait=0.1, lease=0.2)
        assert (await post(brief, key="2")).status == 201
        await asyncio.sleep(0.3)  # the second is over, and what counts them must not be
        assert is_refused(await post(limited(app, store, most=1), key="3"))

    run(main())


def test_of_many_at_once_as_many_run_as_may(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = limited(app, store, most=7)
        answers = await asyncio.gather(*(post(target, key=f"k{n}") for n in range(60)))
        assert app.runs == 7
        assert sorted(each.status for each in answers) == [201] * 7 + [429] * 53

    run(main())


def test_it_is_kept_with_the_documented_rights(own_server: OwnServer) -> None:
    server = own_server()
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "payments", *rules())
    url = f"redis://payments:{PASSWORD}@127.0.0.1:{server.port}/0"
    run(count_three(RedisStore(url)))


def test_it_is_kept_on_every_node_of_a_cluster_and_where_results_are_sealed() -> None:
    with Cluster() as cluster:
        plain = ClusterStore(cluster.url, "plain")
        for store in (plain, SealedStore(ClusterStore(cluster.url, "sealed"), NEW)):

            async def main(store: Store = store) -> None:
                for n in range(10):  # as many nodes as they fall on
                    await count_three(store, f"caller-{n}")

            run(main(), limit=60)


async def count_three(store: Store, caller: str = "alice") -> None:
    app = App()
    target = limited(app, store, most=2)
    headers = [("caller", caller)]
    answers = [await post(target, key=key, headers=headers) for key in "123"]
    assert [each.status for each in answers] == [201, 201, 429]
    assert app.runs == 2


class Deaf:
    """A store that takes receipts and counts none; their release hangs where `holds` says so."""

    def __init__(
        self,
        store: Store,
        hangs: asyncio.Event | None = None,
        holds: asyncio.Event | None = None,
    ) -> None:
        self._store = store
        self._hangs = hangs
        self._holds = holds
        self.first = 0  # so many are counted
        self.namespace = store.namespace

    def open(self) -> Any:
        return self._store.open()

    def open_async(self) -> Any:
        door: Any = self._store.open_async()
        whole, done = door.eval, door.execute

        async def eval(script: str, *rest: Any) -> Any:
            if script != "caller_note" or self.first > 0:
                self.first -= script == "caller_note"
                return await whole(script, *rest)
            if self._hangs is not None:
                self._hangs.set()
                await asyncio.Event().wait()
            raise StoreUnavailable(reason="gone")

        async def execute(command: Command) -> Reply:
            if self._holds is not None and isinstance(command, Release):
                await self._holds.wait()
            return await done(command)

        door.eval, door.execute = eval, execute
        return door


def test_a_count_that_fails_runs_nothing_and_holds_no_key(store: Store) -> None:
    told: list[Event] = []

    async def main() -> None:
        app = App()
        holds = asyncio.Event()
        with listening(told.append):
            answer = await post(limited(app, Deaf(store, holds=holds)))  # and waits for no release
        assert answer.status == 503
        assert app.runs == 0
        later = asyncio.create_task(post(limited(app, store)))
        holds.set()
        assert (await later).status == 201

    run(main())
    assert "store-unavailable" in [each.kind for each in told]


def test_a_count_that_fails_stops_nothing_where_the_user_chose_to_run(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = limited(app, Deaf(store), on_store_error="run")
        assert (await post(target)).status == 201
        assert (await post(target)).replayed  # the receipt was there: it is protected

    run(main())


def test_a_request_that_is_cancelled_while_it_is_counted_holds_no_key(store: Store) -> None:
    async def main() -> None:
        app = App()
        counting = asyncio.Event()
        request = asyncio.create_task(post(limited(app, Deaf(store, counting))))
        await asyncio.wait_for(counting.wait(), 10)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert app.runs == 0
        assert (await post(limited(app, store))).status == 201

    run(main())


def test_work_whose_worker_died_goes_on_whatever_the_count(store: Store) -> None:
    """To give it up would forget that there was such a call."""

    async def main() -> None:
        app = App()
        target = limited(app, store, most=1, fingerprint="none")
        dead = AsyncReceipts(store, policy())
        await (await held(dead, Call("1", "own:alice"))).interrupt()
        assert (await post(target, key="2")).status == 201
        assert (await post(target, key="1")).status == 201
        assert is_refused(await post(target, key="3"))
        assert app.runs == 2

    run(main())


def test_who_lost_a_receipt_changes_nothing_of_its_next_owners_count(store: Store) -> None:
    """Given an owner that comes back too late, to a receipt that another one has by now."""

    async def main() -> None:
        first, second = (Counted(store, "own:alice", b"1") for _ in range(2))
        assert await first.note(60.0, 1) is None
        await asyncio.sleep(0.002)  # it is told by the end it noted, in ms
        assert await second.note(50.0, 0) is None
        await first.drop()
        await first.keep(0.001)
        other = Counted(store, "own:alice", b"2")
        left = await other.note(60.0, 1)
        assert left is not None
        assert 40 < left <= 50
        await second.drop()
        assert await other.note(60.0, 1) is None

    run(main())


def test_a_release_whose_count_hangs_is_answered(store: Store) -> None:
    async def main() -> None:
        app = App(status=500)
        counting = asyncio.Event()
        slow = Deaf(store, counting)
        slow.first = 1  # the note is answered, what comes after hangs
        answer = await post(limited(app, slow))
        assert answer.status == 500
        await asyncio.wait_for(counting.wait(), 10)

    run(main())


def test_the_count_has_a_name_that_tells_nothing(redis_url: str) -> None:
    async def main() -> None:
        store = RedisStore(redis_url, "limit")
        secret = [("caller", "secret-caller")]
        await post(limited(App(), store), key="secret-key", headers=secret)
        door = store.open_async()
        name = f"limit:n:{digest('limit', 'own:secret-caller', '').hex()}"
        assert await door.command("ZCARD", name) == 1
        members = await door.command("ZRANGE", name, 0, -1)
        assert members == [digest("limit", "own:secret-caller", "secret-key")]
        left = await door.command("PTTL", name)
        assert 0 < left <= 86_400_000
        await door.close()

    run(main())


@pytest.mark.parametrize("bad", [-1, 1.5, True, "many"])
def test_a_limit_that_is_none_is_refused_at_start(bad: Any) -> None:
    with pytest.raises(SettingsError, match="max_receipts"):
        IdempotencyPolicy(max_receipts=bad)
    with pytest.raises(SettingsError, match="max_receipts"):
        Settings(max_receipts=bad)


def test_without_a_limit_nothing_is_counted(redis_url: str) -> None:
    async def main() -> None:
        store = RedisStore(redis_url, "limit")
        await post(wrapped(App(), store))
        door = store.open_async()
        assert await door.command("DBSIZE") == 1
        await door.close()

    run(main())
