"""From a URL to a store."""

from __future__ import annotations

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


@pytest.mark.parametrize("url", ["http://x", "redis", "", "redis+cluster://a,b"])
def test_B059_a_url_that_cannot_be_used_is_refused_at_start(url: str) -> None:
    with pytest.raises(SettingsError):
        open_store(url)


def test_a_password_is_in_no_repr() -> None:
    assert "secret" not in repr(open_store("redis://user:secret@127.0.0.1:1/0"))


def test_replicas_that_cannot_be_waited_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRYSAFE_REPLICAS", "1")
    with pytest.raises(SettingsError, match="REPLICAS"):
        open_store("redis://127.0.0.1:1/0")
