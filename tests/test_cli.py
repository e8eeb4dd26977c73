"""The command line: what it shows of a store is what lies there, and an operator's word holds."""

from __future__ import annotations

import asyncio
import base64
import os
import pty
import re
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from retrysafe.breaker import BreakerPolicy, CircuitBreaker
from retrysafe.cli.commands import cli
from retrysafe.cli.doctor import FAIL, OK, WARN, Finding, examine
from retrysafe.decorators import idempotent
from retrysafe.desks import async_desk_for
from retrysafe.errors import BreakerOpen
from retrysafe.job_budget import JobBudget
from retrysafe.receipts import AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.settings import Settings
from retrysafe.stores import open_store
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.sealed import SealedStore
from tests.conftest import OwnServer
from tests.receipting import ONE, policy
from tests.servers import Cluster
from tests.stores.test_acl import PASSWORD, rules
from tests.support import run, until, wait_until

ROOT = Path(__file__).resolve().parent.parent


class Shell:
    """`retrysafe …` against one store."""

    def __init__(self, url: str, namespace: str = "shop") -> None:
        self.store = open_store(url, namespace=namespace)
        self.receipts = Receipts(self.store, policy())
        self.environment = {"RETRYSAFE_REDIS_URL": url, "RETRYSAFE_NAMESPACE": namespace}

    def __call__(self, *words: str, input: str | None = None) -> Result:
        return CliRunner().invoke(cli, list(words), input=input, env=self.environment)

    def ok(self, *words: str) -> list[str]:
        """The lines that it printed; it must have ended well."""
        done = self(*words)
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout.splitlines()

    def begin(self, key: str, scope: str = "", request_id: str = "") -> Held:
        held = self.receipts.begin(Call(key, scope, ONE, request_id))
        assert isinstance(held, Held)
        return held


@pytest.fixture
def shell(redis_url: str) -> Shell:
    return Shell(redis_url)


# Receipts


def test_receipts_are_listed_by_state(shell: Shell) -> None:
    shell.begin("done", request_id="req-1").finish(b"r", 60)
    shell.begin("not-kept").finish(None, 60)
    running = shell.begin("running", request_id="req-2")
    shell.begin("abandoned").interrupt()
    lines = shell.ok("receipts", "list")
    assert sorted(line.split()[1] for line in lines) == ["abandoned", "done", "not-kept", "running"]
    (line,) = shell.ok("receipts", "list", "--state", "running")
    assert line.startswith(running.name[:12])
    assert line.endswith("req-2")
    assert "lease ends in" in line
    assert len(shell.ok("receipts", "list", "--limit", "3")) == 3
    assert "3 of them" in shell("receipts", "list", "--limit", "3").stderr
    assert shell("receipts", "list", "--limit", "4").stderr == "4 in all\n"
    running.release()


def test_every_receipt_is_listed_once_and_no_other_namespace_is(redis_url: str) -> None:
    shell, near = Shell(redis_url, "shop"), Shell(redis_url, "shop:r")
    near.begin("k").finish(b"r", 60)
    names = set()
    for n in range(2_300):  # more than a page
        held = shell.begin(f"k{n}")
        names.add(held.name[:12])
        held.finish(b"r", 60)
    lines = shell.ok("receipts", "list", "--limit", "0")
    assert len(lines) == len(names)
    assert {line.split()[0] for line in lines} == names


def test_what_is_no_receipt_of_ours_is_shown_as_such(shell: Shell, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for digest, value in (
            ("0" * 32, b"junk"),
            ("1" * 32, b"r1D" + b"0" * 20),  # cut
            ("2" * 32, b"r1R" + b"0" * 90 + b"\xff"),
            ("3" * 32, b"r9D" + b"0" * 300),  # of a later version
        ):
            client.set(f"shop:r:{digest}", value, ex=60)
        client.rpush(f"shop:r:{'4' * 32}", "a list")
        client.expire(f"shop:r:{'4' * 32}", 60)
        client.set("shop:r:not-a-digest", "x", ex=60)
    lines = sorted(shell.ok("receipts", "list", "--state", "corrupt"))
    assert [line[0] for line in lines] == ["0", "1", "2", "3", "4"]
    assert "corrupt" in shell.ok("receipts", "show", "4" * 12)[1]
    assert shell("receipts", "forget", "4" * 32, "--yes").exit_code == 0


def test_a_receipt_is_shown_without_its_result(shell: Shell) -> None:
    secret = b"card 4111 1111 1111 1111"
    held = shell.begin("o-17", "shop.pay", "req-7")
    held.finish(secret * 50_000, 60)
    for words in ([held.name[:12]], [held.name], ["--key", "o-17", "--scope", "shop.pay"]):
        text = "\n".join(shell.ok("receipts", "show", *words))
        assert held.name in text
        assert "done" in text
        assert "req-7" in text
        assert str(held.fence) in text
        assert str(len(secret) * 50_000)[:4] in text
        assert "4111" not in text


def test_processes_that_wait_are_counted(redis_url: str) -> None:
    shell = Shell(redis_url)
    first = shell.begin("k")

    async def main() -> None:
        waiting = asyncio.create_task(
            AsyncReceipts(RedisStore(redis_url, "shop"), policy()).begin(Call("k", "", ONE))
        )
        await until(lambda: len(raw(redis_url, first.name)) > size)
        shown = await asyncio.to_thread(shell.ok, "receipts", "show", first.name)
        assert "waiting     1 processes" in shown
        await asyncio.to_thread(first.finish, b"r", 60)
        assert isinstance(await waiting, Record)

    size = len(raw(redis_url, first.name))
    run(main())


def raw(url: str, name: str) -> bytes:
    with redis.Redis.from_url(url) as client:
        value: Any = client.get(f"shop:r:{name}")
        return bytes(value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name one receipt"),
        (("abcdefabcdef", "--key", "k"), "name one receipt"),
        (("abc",), "is no digest"),
        (("ABCDEFABCDEF",), "is no digest"),
        (("*",), "is no digest"),
        (("abcdefabcdef",), "there is no receipt abcdefabcdef in 'shop'"),
        (("--key", "k"), "there is no receipt"),
    ],
)
@pytest.mark.parametrize("command", ["show", "forget"])
def test_what_names_no_receipt_is_said_plainly(
    shell: Shell, command: str, words: tuple[str, ...], said: str
) -> None:
    done = shell("receipts", command, *words)
    assert done.exit_code != 0
    assert said in done.output


def test_digits_that_begin_several_receipts_name_none(shell: Shell, redis_url: str) -> None:
    held = shell.begin("k")
    twin = held.name[:12] + "0" * 20
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"shop:r:{twin}", raw(redis_url, held.name), ex=60)
    done = shell("receipts", "forget", held.name[:12], "--yes")
    assert done.exit_code == 1
    assert held.name in done.output
    assert twin in done.output
    held.release()


def test_a_forgotten_receipt_runs_again_and_only_when_that_was_meant(shell: Shell) -> None:
    ran: list[str] = []

    @idempotent(key="order", store=shell.store)
    def pay(order: str) -> str:
        ran.append(order)
        return "paid"

    pay("o-1")
    (line,) = shell.ok("receipts", "list")
    name = line.split()[0]
    refused = shell("receipts", "forget", name, input="n\n")
    assert refused.exit_code == 1
    assert "once more" in refused.output
    pay("o-1")
    assert ran == ["o-1"]
    assert shell("receipts", "forget", name, input="y\n").exit_code == 0
    assert shell("receipts", "forget", name, "--yes").exit_code == 1
    pay("o-1")
    assert ran == ["o-1", "o-1"]


def test_processes_that_keep_a_record_at_hand_are_told_that_it_is_forgotten(redis_url: str) -> None:
    shell = Shell(redis_url)

    async def main() -> None:
        store = RedisStore(redis_url, "shop")
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "", ONE)
        shell.begin("k").finish(b"r", 60)
        desk = async_desk_for(store, 10)
        await receipts.begin(call)
        await until(lambda: desk.finished.heard)
        await receipts.begin(call)
        digest = receipts._digest(call)
        assert desk.finished.get(digest, 0.0) is not None
        await asyncio.to_thread(shell.ok, "receipts", "forget", digest.hex(), "--yes")
        await until(lambda: desk.finished.get(digest, 0.0) is None)

    run(main())


def test_the_receipts_of_every_node_of_a_cluster_are_met() -> None:
    with Cluster() as cluster:
        shell = Shell(cluster.url)
        names = set()
        for n in range(60):
            held = shell.begin(f"k{n}")
            names.add(held.name[:12])
            held.finish(b"r", 60)
        breaker = CircuitBreaker("bank", shared=shell.store)
        breaker.force_open()
        assert {line.split()[0] for line in shell.ok("receipts", "list", "--limit", "0")} == names
        assert shell.ok("breakers", "list") == ["bank  forced-open"]
        assert shell.ok("receipts", "show", min(names))[0].split()[1].startswith(min(names))
        levels = [line.split()[0] for line in shell.ok("doctor")]
        assert FAIL not in levels


def test_sealed_receipts_are_listed_without_their_keys(redis_url: str) -> None:
    ring = base64.b64encode(bytes(range(32))).decode()
    sealed = Receipts(SealedStore(RedisStore(redis_url, "shop"), ring), policy())
    held = sealed.begin(Call("k", "", ONE))
    assert isinstance(held, Held)
    held.finish(b"result", 60)
    (line,) = Shell(redis_url).ok("receipts", "list")
    assert line.split()[:2] == [held.name[:12], "done"]


# Breakers and jobs


def _is(breaker: CircuitBreaker, state: str) -> bool:
    return breaker.state == state


def test_breakers_are_listed_and_obey(shell: Shell) -> None:
    rules = BreakerPolicy(min_calls=2, open_for=60.0)
    bank = CircuitBreaker("bank {eu}: 100%", rules, shared=shell.store)
    assert shell.ok("breakers", "list") == []
    bank.acquire().failure()
    assert shell.ok("breakers", "list") == [
        "bank {eu}: 100%  closed       1 failed, 0 slow of 1 calls"
    ]
    bank.acquire().failure()
    (line,) = shell.ok("breakers", "list")
    assert re.search(r"  open +a probe in \d+ s$", line)
    for command, state in (("open", "forced-open"), ("close", "disabled"), ("reset", "closed")):
        shell.ok("breakers", command, bank.name)
        assert shell.ok("breakers", "list") == [f"{bank.name}  {state}"]
        wait_until(partial(_is, bank, state))
    shell.ok("breakers", "open", bank.name)
    wait_until(partial(_is, bank, "forced-open"))
    with pytest.raises(BreakerOpen):
        bank.acquire()


def test_a_breaker_whose_time_is_up_is_shown_as_its_next_call_meets_it(shell: Shell) -> None:
    rules = BreakerPolicy(min_calls=1, open_for=0.05, open_cap=0.05)
    bank = CircuitBreaker("bank", rules, shared=shell.store)
    bank.acquire().failure()
    wait_until(lambda: shell.ok("breakers", "list") == ["bank  half-open"])


def test_an_operators_word_that_does_not_arrive_is_an_error(own_server: OwnServer) -> None:
    server = own_server()
    shell = Shell(server.url)
    server.kill()
    done = shell("breakers", "open", "bank")
    assert done.exit_code == 1
    assert "unavailable" in done.output
    assert shell("breakers", "open", "").exit_code == 2


def test_jobs_are_listed_by_what_they_spent(shell: Shell) -> None:
    budget = JobBudget(shell.store, limit=1)
    for job in ("a:1%", "b"):
        assert budget.requeue_sync(job, "gpu", 1)
    assert not budget.spend_sync("b", "gpu", attempt=2)
    lines = shell.ok("jobs")
    assert lines[0].startswith("a:1%  gpu  attempt 2  retries spent: 1  expires in")
    assert "given up" in lines[1]
    assert shell.ok("jobs", "--given-up") == lines[1:]


def test_what_is_no_breaker_or_job_of_ours_hides_no_other(shell: Shell, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for name in ("b:{list}", "job:list:gpu"):
            client.rpush(f"shop:{name}", "x")
        for name in ("b:{junk}", "job:junk:gpu"):
            client.hset(f"shop:{name}", mapping={"s": "open", "u": "soon", "n": "x", "a": "y"})
        for name in ("b:{other}", "job:other:gpu"):
            client.hset(f"shop:{name}", "z", "1")
        for name in client.keys("shop:*"):
            client.expire(name, 60)
    CircuitBreaker("bank", shared=shell.store).force_open()
    JobBudget(shell.store).give_up_sync("j-1", "gpu")
    assert [line.split()[:2] for line in shell.ok("breakers", "list")] == [
        ["bank", "forced-open"], ["junk", "corrupt"], ["list", "corrupt"], ["other", "corrupt"],
    ]  # fmt: skip
    assert [line.split()[:3] for line in shell.ok("jobs")] == [
        ["j-1", "gpu", "attempt"], ["junk", "gpu", "corrupt"],
        ["list", "gpu", "corrupt"], ["other", "gpu", "corrupt"],
    ]  # fmt: skip
    assert len(shell.ok("jobs", "--given-up")) == 1
    assert shell("top", "--once").exit_code == 0


def test_names_give_the_terminal_no_orders(shell: Shell) -> None:
    name = "[bold]\x1b]0;title\x07\u202eabc\nforced-open\ud7ff"
    CircuitBreaker(name, shared=shell.store).force_open()
    JobBudget(shell.store).give_up_sync(name, "gpu")
    shell.begin("k", request_id="id\x1b[2J").release()
    shell.begin("k2", request_id="id\x1b[2J").finish(b"r", 60)
    for words in (("breakers", "list"), ("jobs",), ("top", "--once"), ("receipts", "list")):
        text = "\n".join(shell.ok(*words))
        assert all(each.isprintable() or each == "\n" for each in text), words
    assert shell.ok("breakers", "list")[0].startswith("[bold]\\x1b]0;title\\x07\\u202eabc\\n")


# Doctor


def findings(url: str, **settings: Any) -> list[Finding]:
    async def main() -> list[Finding]:
        return [each async for each in examine(RedisStore(url, "shop"), Settings(**settings))]

    return run(main())


def said(found: list[Finding], level: str) -> str:
    return "\n".join(each.text for each in found if each.level == level)


def test_a_sound_store_has_no_faults_and_nothing_is_left_in_it(own_server: OwnServer) -> None:
    server = own_server(appendonly="yes")
    found = findings(server.url)
    assert {each.level for each in found} == {OK}, found
    text = said(found, OK)
    assert "is told of the end" in text
    assert "finished and read back" in text
    with server.client() as client:
        assert client.dbsize() == 0


def test_what_limits_a_promise_is_told(own_server: OwnServer) -> None:
    server = own_server(maxmemory="100mb", **{"maxmemory-policy": "allkeys-lru"})
    found = findings(server.url, on_store_error="run", disabled=True, replicas=1)
    warned = said(found, WARN)
    assert "allkeys-lru" in warned
    assert "appendonly" in warned
    assert "ON_STORE_ERROR" in warned
    assert "DISABLED" in warned
    assert "REPLICAS is 1 and the server has 0" in said(found, FAIL)


def test_the_rights_that_are_documented_for_people_are_enough(own_server: OwnServer) -> None:
    server = own_server(appendonly="yes")
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "payments", *rules(), "+scan", "+info")
    shell = Shell(f"redis://payments:{PASSWORD}@127.0.0.1:{server.port}/0", "retrysafe")
    held = shell.begin("k")
    for words in (
        ("doctor",),
        ("top", "--once"),
        ("jobs",),
        ("breakers", "open", "bank"),
        ("breakers", "list"),
        ("receipts", "list"),
        ("receipts", "show", held.name),
        ("receipts", "forget", held.name, "--yes"),
    ):
        shell.ok(*words)
    with server.client() as admin:
        assert not [each for each in admin.acl_log() if each["username"] == "payments"]


def test_a_user_who_may_not_enough_is_told_what(own_server: OwnServer) -> None:
    server = own_server()
    with server.client() as admin:
        for user, rights in (
            ("deaf", ["+@all", "-subscribe", "-info", "resetchannels"]),
            ("strict", ["+@all", "-evalsha", "-eval", "&*"]),
        ):
            admin.execute_command("ACL", "SETUSER", user, "on", "nopass", "~*", *rights)
    place = f"127.0.0.1:{server.port}/0"
    deaf = said(findings(f"redis://deaf:x@{place}"), WARN)
    assert "messages don't arrive" in deaf
    assert "doesn't tell about itself" in deaf
    strict = said(findings(f"redis://strict:x@{place}"), FAIL)
    assert "NOPERM" in strict


def test_a_store_out_of_reach_is_told_with_the_reason(own_server: OwnServer) -> None:
    server = own_server()
    server.kill()
    done = Shell(server.url)("doctor")
    assert done.exit_code == 1
    assert "FAIL" in done.stdout
    assert "ConnectionError: " in done.stdout
    hidden = Shell(f"redis://user:hunter2@127.0.0.1:{server.port}/0")("doctor")
    assert "hunter2" not in hidden.output


@pytest.mark.parametrize(
    ("environment", "words", "said"),
    [
        ({}, ("doctor",), "no store is named"),
        ({"RETRYSAFE_REDIS_URL": "memory://"}, ("doctor",), "its own process alone"),
        ({"RETRYSAFE_REDIS_URL": "redis://h", "RETRYSAFE_TTLL": "1h"}, ("jobs",), "RETRYSAFE_TTLL"),
        ({}, ("receipts", "list", "--url", "http://h"), "scheme"),
        ({}, ("top", "--url", "redis://h", "--namespace", "{a}"), "namespace"),
    ],
)
def test_settings_that_cannot_be_used_end_a_command_before_it_begins(
    environment: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    done = CliRunner().invoke(cli, list(words), env=environment)
    assert done.exit_code == 2
    assert said in done.output


# Top, and the command itself


def test_top_shows_what_is_unfinished_open_and_given_up(shell: Shell) -> None:
    held = shell.begin("k")
    shell.begin("done").finish(b"r", 60)
    CircuitBreaker("bank", shared=shell.store).force_open()
    budget = JobBudget(shell.store, limit=1)
    budget.give_up_sync("j-1", "gpu")
    text = "\n".join(shell.ok("top", "--once"))
    for part in (
        "shop  2 receipts  1 done, 1 running",
        held.name[:12],
        "bank",
        "forced-open",
        "j-1",
    ):
        assert part in text
    assert "1 of more receipts" in "\n".join(shell.ok("top", "--once", "--most", "1"))
    held.release()


@pytest.mark.parametrize("terminal", [False, True])
def test_top_looks_again_until_it_is_interrupted(redis_url: str, terminal: bool) -> None:
    mine, its = pty.openpty() if terminal else os.pipe()
    # Tests that a shell runs in its background ignore SIGINT, and so would their children.
    interruptible = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from retrysafe.cli import main; main()"
    )
    watching = subprocess.Popen(
        [sys.executable, "-c", interruptible, "top", "--every", "0.1"],
        env={
            **os.environ,
            "RETRYSAFE_REDIS_URL": redis_url,
            "RETRYSAFE_NAMESPACE": "shop",
            "TERM": "xterm",
        },
        cwd=ROOT,
        stdout=its,
    )
    seen = b""

    def shows(text: bytes) -> bool:
        nonlocal seen
        if select.select([mine], [], [], 0)[0]:
            seen += os.read(mine, 4096)
        return text in seen

    try:
        wait_until(lambda: shows(b"0 receipts"), 30)
        Shell(redis_url).begin("k").finish(b"r", 60)
        wait_until(lambda: shows(b"1 receipts"), 30)
        watching.send_signal(signal.SIGINT)
        wait_until(lambda: shows(b"none") or watching.poll() is not None, 30)
        assert watching.poll() == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(mine)
        os.close(its)


def test_the_commands_are_those_that_are_documented() -> None:
    assert sorted(cli.commands) == [
        "breakers", "demo", "doctor", "jobs", "receipts", "sagas", "top",
    ]  # fmt: skip
    groups: Any = cli.commands
    assert sorted(groups["receipts"].commands) == ["forget", "list", "show"]
    assert sorted(groups["breakers"].commands) == ["close", "list", "open", "reset"]
    assert sorted(groups["sagas"].commands) == ["list", "resume", "settle", "show"]
