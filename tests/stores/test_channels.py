"""Channels by their literal name, over each door: confirmed, heard, told of a loss, ended."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import redis

from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from tests.conftest import OwnServer
from tests.support import run, until, wait_until

CHANNELS = [b"news:%d" % n for n in range(3)]


class Heard:
    """What one channel brought."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.losses = 0

    def __call__(self, message: bytes | None) -> None:
        if message is None:
            self.losses += 1
        else:
            self.messages.append(message)


def test_a_thread_hears_each_channel_and_after_unsubscribing_none(redis_url: str) -> None:
    door = RedisStore(redis_url).open()
    client = redis.Redis.from_url(redis_url)
    heard = {channel: Heard() for channel in CHANNELS}
    try:
        assert all(door.subscribe(channel, each, 2.0) for channel, each in heard.items())
        for channel in CHANNELS:
            assert client.publish(channel, b"to " + channel) == 1
        wait_until(lambda: all(each.messages for each in heard.values()))
        door.unsubscribe(CHANNELS[0])
        wait_until(lambda: client.pubsub_numsub(CHANNELS[0])[0][1] == 0)
        assert client.pubsub_numsub(CHANNELS[1])[0][1] == 1
        assert [each.messages for each in heard.values()] == [[b"to " + c] for c in CHANNELS]
    finally:
        door.close()


def test_a_thread_whose_connection_was_killed_hears_again_and_is_told(redis_url: str) -> None:
    door = RedisStore(redis_url).open()
    client = redis.Redis.from_url(redis_url)
    heard = Heard()
    try:
        assert door.subscribe(CHANNELS[0], heard, 2.0)
        client.client_kill_filter(_type="pubsub")
        wait_until(lambda: heard.losses == 1)
        assert client.publish(CHANNELS[0], b"again") == 1
        wait_until(lambda: heard.messages == [b"again"])
    finally:
        door.close()


def test_a_channel_that_is_forbidden_does_not_end_the_others(redis_url: str) -> None:
    admin = redis.Redis.from_url(redis_url)
    admin.execute_command("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "+@all", "&news:0")
    door = RedisStore(redis_url.replace("redis://", "redis://deaf:pw@")).open()
    heard = Heard()
    try:
        assert door.subscribe(CHANNELS[0], heard, 2.0)
        assert not door.subscribe(b"forbidden", Heard(), 0.3)
        assert admin.publish(CHANNELS[0], b"still here") == 1
        wait_until(lambda: heard.messages == [b"still here"])
        assert heard.losses == 0
    finally:
        door.close()
        admin.execute_command("ACL", "DELUSER", "deaf")


def test_a_loop_hears_each_channel_over_one_connection(own_server: OwnServer) -> None:
    server = own_server()
    client = server.client()

    async def given() -> None:
        door = RedisStore(server.url).open_async()
        heard = {channel: Heard() for channel in CHANNELS}
        for channel, each in heard.items():
            assert await door.subscribe(channel, each, 2.0)
        assert len(client.client_list(_type="pubsub")) == 1
        client.client_kill_filter(_type="pubsub")
        await until(lambda: all(each.losses == 1 for each in heard.values()))
        door.unsubscribe(CHANNELS[0])
        await until(lambda: client.pubsub_numsub(CHANNELS[0])[0][1] == 0)
        for channel in CHANNELS:
            client.publish(channel, b"to " + channel)
        await until(lambda: all(heard[channel].messages for channel in CHANNELS[1:]))
        assert heard[CHANNELS[0]].messages == []
        await door.close()

    run(given())


def _has_heard(heard: Heard) -> bool:
    return heard.messages != []


def test_a_channel_left_and_joined_again_at_once_is_heard(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)

    async def given() -> None:
        door = RedisStore(redis_url).open_async()
        for turn in range(20):
            heard = Heard()
            assert await door.subscribe(CHANNELS[0], heard, 2.0)
            client.publish(CHANNELS[0], b"%d" % turn)
            await until(partial(_has_heard, heard))
            door.unsubscribe(CHANNELS[0])
        await door.close()

    run(given())


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_memory_has_channels_too(colour: str) -> None:
    store = MemoryStore()
    heard = Heard()

    async def subscribed() -> Any:
        door = store.open_async()
        assert await door.subscribe(CHANNELS[0], heard, 1.0)
        return door

    door = run(subscribed()) if colour == "async" else store.open()
    if colour == "sync":
        assert door.subscribe(CHANNELS[0], heard, 1.0)
    store._keyspace.publish(CHANNELS[0], b"one")
    door.unsubscribe(CHANNELS[0])
    store._keyspace.publish(CHANNELS[0], b"two")
    assert heard.messages == [b"one"]
    assert store._keyspace.channels == {}


def test_a_thread_that_did_not_wait_for_the_confirmation_is_told_of_it(
    own_server: OwnServer,
) -> None:
    server = own_server()
    door = RedisStore(server.url).open()
    heard = Heard()
    try:
        assert door.subscribe(CHANNELS[1], Heard(), 5.0)
        server.pause()
        assert not door.subscribe(CHANNELS[0], heard, 0)
        assert heard.losses == 0
        server.resume()
        wait_until(lambda: heard.losses == 1)  # something may have come before it
        with server.client() as client:
            assert client.publish(CHANNELS[0], b"news") == 1
        wait_until(lambda: heard.messages == [b"news"])
    finally:
        door.close()
