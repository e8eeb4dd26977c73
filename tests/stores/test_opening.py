"""From a URL to a store."""

from __future__ import annotations

from typing import Any

import pytest

from retrysafe.errors import SettingsError
from retrysafe.stores import open_store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore


def test_a_url_opens_its_store_once() -> None:
    store = open_store("redis://127.0.0.1:1/0")
    assert isinstance(store, RedisStore)
    assert open_store("redis://127.0.0.1:1/0") is store
    assert open_store("redis://127.0.0.1:1/0", namespace="other") is not store
    assert isinstance(open_store("memory://"), MemoryStore)


def test_B059_memory_is_never_taken_in_silence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRYSAFE_NAMESPACE", "silent")
    assert isinstance(open_store(), MemoryStore)
    open_store()
    assert caplog.text.count("RETRYSAFE_REDIS_URL") == 1
    caplog.clear()
    open_store("memory://", namespace="said")
    assert not caplog.text


@pytest.mark.parametrize("url", ["http://x", "redis", "", "redis+cluster://a,b/1"])
def test_B059_a_url_that_cannot_be_used_is_refused_at_start(url: str) -> None:
    with pytest.raises(SettingsError):
        open_store(url)


def test_a_password_is_in_no_repr() -> None:
    assert "secret" not in repr(open_store("redis://user:secret@127.0.0.1:1/0"))


@pytest.mark.parametrize("namespace", ["", "{a}", "a b", "a*", "é", "n" * 65, 5])
def test_a_namespace_that_is_none_fails_when_the_store_is_opened(namespace: Any) -> None:
    for url in ("memory://", "redis://127.0.0.1:1"):
        with pytest.raises(SettingsError, match="namespace holds"):
            open_store(url, namespace=namespace)


def test_replicas_are_read_from_the_settings_and_memory_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "redis://127.0.0.1:1/0"
    monkeypatch.setenv("RETRYSAFE_REPLICAS", "1")
    asked = open_store(url, namespace="asked")
    assert isinstance(asked, RedisStore)
    assert asked.replicas == 1
    other = open_store(url, namespace="asked", replicas=0)
    assert isinstance(other, RedisStore)
    assert other.replicas == 0
    for memory in ("memory://", None):
        with pytest.raises(SettingsError, match="RETRYSAFE_REPLICAS holds 1"):
            open_store(memory, namespace="asked")
    with pytest.raises(SettingsError, match="replicas holds -1"):
        open_store(url, replicas=-1)


def test_several_hosts_open_the_store_of_their_kind() -> None:
    assert type(open_store("redis+sentinel://a,b/payments")).__name__ == "SentinelStore"
    assert type(open_store("rediss+cluster://a,b")).__name__ == "ClusterStore"
