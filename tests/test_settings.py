"""Settings, units and policies: what is taken, what is refused, and how that is told."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe import units
from retrysafe.errors import SettingsError
from retrysafe.policy import IdempotencyPolicy, Recovered
from retrysafe.settings import BackoffSpec, Settings, parse_backoff
from retrysafe.urls import check_store_url, masked

DOCUMENTED = {
    "REDIS_URL": ("redis://h", None),
    "NAMESPACE": ("shop", "retrysafe"),
    "TTL": ("7d", 86400.0),
    "LEASE": ("45s", 30.0),
    "WAIT": ("250ms", 10.0),
    "MAX_WAITERS": ("5", 10_000),
    "ON_ABANDONED": ("refuse", "rerun"),
    "ON_STORE_ERROR": ("run", "refuse"),
    "REPLICAS": ("2", 0),
    "METHODS": ("put, post", frozenset({"POST", "PATCH"})),
    "REQUIRE_KEY": ("true", False),
    "KEY_HEADER": ("X-Key", "Idempotency-Key"),
    "MAX_REQUEST_BODY": ("1MiB", 10 * 1024 * 1024),
    "MAX_RESPONSE_BODY": ("512KiB", 4 * 1024 * 1024),
    "DISABLED": ("on", False),
    "REQUEST_ID_HEADER": ("X-Correlation-ID", "X-Request-ID"),
    "RETRY_ATTEMPTS": ("7", 4),
    "RETRY_DEADLINE": ("1m", 30.0),
    "RETRY_BACKOFF": ("immediate+fixed:400ms", "full-jitter:100ms..10s"),
    "BREAKER_FAILURE_RATE": ("0.25", 0.5),
    "BREAKER_MIN_CALLS": ("50", 20),
    "BREAKER_OPEN_FOR": ("1m", 30.0),
    "BREAKER_PROBES": ("3", 1),
}


def faults_of(**environ: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({f"RETRYSAFE_{name}": text for name, text in environ.items()})
    return caught.value.faults


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    for name, (_, default) in DOCUMENTED.items():
        assert getattr(settings, name.lower()) == default


@pytest.mark.parametrize("name", DOCUMENTED)
def test_each_documented_variable_is_read(name: str) -> None:
    text, default = DOCUMENTED[name]
    value = getattr(Settings.from_env({f"RETRYSAFE_{name}": text}), name.lower())
    assert value != default


def test_the_process_environment_is_read_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RETRYSAFE_WAIT", "0")
    assert Settings.from_env().wait == 0.0


def test_methods_are_read_as_a_list_in_any_case() -> None:
    assert Settings.from_env({"RETRYSAFE_METHODS": " put,Post "}).methods == {"PUT", "POST"}


def test_every_fault_is_told_at_once_with_variable_value_and_what_it_takes() -> None:
    faults = faults_of(TTL="24x", REQUIRE_KEY="maybe", METHOD="POST", BREAKER_PROBES="0")
    told = "\n".join(faults)
    assert len(faults) == 4
    assert "RETRYSAFE_TTL holds '24x'" in told and "takes a duration such as 250ms" in told
    assert "RETRYSAFE_REQUIRE_KEY holds 'maybe'" in told and "takes true or false" in told
    assert "RETRYSAFE_METHOD is no setting" in told and "nearest is RETRYSAFE_METHODS" in told
    assert "RETRYSAFE_BREAKER_PROBES holds '0'" in told and "at least 1" in told


def test_an_error_of_settings_survives_pickling_and_is_a_value_error() -> None:
    error = SettingsError(["one", "two"])
    again = pickle.loads(pickle.dumps(error))
    assert again.faults == ["one", "two"] and str(again) == str(error)
    assert isinstance(error, ValueError)


def test_a_variable_in_the_wrong_case_is_a_fault_not_a_silence() -> None:
    with pytest.raises(SettingsError, match="nearest is RETRYSAFE_TTL"):
        Settings.from_env({"retrysafe_ttl": "1h"})


def test_variables_of_others_are_left_alone() -> None:
    environ = {
        "PATH": "/bin",
        "RETRYSAFE_SERVICE_HOST": "10.0.0.1",
        "RETRYSAFE_SERVICE_PORT_HTTP": "80",
        "RETRYSAFE_REDIS_PORT": "tcp://10.0.0.1:6379",
        "RETRYSAFE_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
    }
    assert Settings.from_env(environ) == Settings()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_empty_variable_is_a_fault_for_every_setting(name: str) -> None:
    assert "empty" in faults_of(**{name: " "})[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl", True),
        ("ttl", math.nan),
        ("ttl", math.inf),
        ("ttl", 0),
        ("ttl", -1.0),
        ("ttl", "24h"),
        ("ttl", None),
        ("ttl", 10**400),
        ("lease", 0.0),
        ("lease", 0.0001),
        ("wait", -0.5),
        ("wait", False),
        ("wait", math.nan),
        ("max_waiters", -1),
        ("max_waiters", 1.5),
        ("replicas", True),
        ("methods", "POST"),
        ("methods", ()),
        ("methods", [1]),
        ("require_key", 1),
        ("key_header", "a b"),
        ("key_header", ""),
        ("namespace", "a{b}"),
        ("namespace", ""),
        ("on_abandoned", "run"),
        ("on_store_error", lambda: None),
        ("max_request_body", 0),
        ("max_response_body", 1.0),
        ("disabled", "false"),
        ("retry_attempts", 0),
        ("retry_backoff", "fixed"),
        ("breaker_failure_rate", 0),
        ("breaker_failure_rate", 1.01),
        ("breaker_failure_rate", math.nan),
        ("redis_url", "http://h"),
        ("redis_url", ""),
    ],
)
def test_settings_made_in_code_are_checked_the_same_way(field: str, value: object) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(**{field: value})  # type: ignore[arg-type]
    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith(f"{field} holds ")


def test_I49_a_ttl_shorter_than_the_wait_or_the_lease_is_refused_with_the_reason() -> None:
    with pytest.raises(SettingsError, match=r"ttl is 40s, shorter than wait \(1m\)"):
        Settings(ttl=40, wait=60)
    with pytest.raises(SettingsError, match="receipt could vanish"):
        Settings(ttl=20, wait=1, lease=30)
    assert "RETRYSAFE_WAIT" in faults_of(TTL="1m", WAIT="61s")[0]


def test_I49_zero_negative_and_nan_durations_are_refused_at_start() -> None:
    for text in ("0", "0s", "-5s", "nan", "inf", "1e3", "٣s"):
        assert len(faults_of(TTL=text)) == 1


def test_I49_a_wait_longer_than_the_lease_and_a_wait_of_zero_are_legal() -> None:
    assert Settings(wait=60, lease=5).wait == 60.0
    assert Settings(wait=0).wait == 0.0


def test_the_two_headers_must_differ() -> None:
    assert "two different headers" in faults_of(KEY_HEADER="x-request-id")[0]


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@h:port/0",
        "redis://u:hun@ter2@h/x",
        "redis://:hunter2/a/b@h/zero",
        "rediss://h/0/1?password=hunter2",
        "nothing://u:hunter2@h",
        "u:hunter2@h",
        "redis://:hunter2 @h",
        "memory://u:hunter2@h",
    ],
)
def test_a_password_in_a_url_is_in_no_error(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({"RETRYSAFE_REDIS_URL": url})
    error = caught.value
    assert "hunter2" not in str(error) and "ter2" not in str(error)
    assert error.__cause__ is None
    told = faults_of(NAMESPACE=url)
    assert "ter2" not in "".join(told)


def test_a_password_is_in_no_repr_but_stays_in_the_value() -> None:
    settings = Settings(redis_url="redis://me:hunter2@h/0")
    assert "hunter2" not in repr(settings) and "hunter2" not in f"{settings}"
    assert "redis://***@h/0" in repr(settings)
    assert settings.redis_url == "redis://me:hunter2@h/0"


def test_settings_are_frozen_comparable_and_copyable() -> None:
    settings = Settings(ttl=60)
    with pytest.raises(AttributeError):
        settings.ttl = 1  # type: ignore[misc]
    assert copy.deepcopy(settings) == settings == pickle.loads(pickle.dumps(settings))
    assert isinstance(settings.ttl, float)


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://u:p@localhost:6379/3?socket_timeout=1",
        "rediss://[::1]:6380/0",
        "unix:///run/redis.sock?db=1",
        "unix://u:p@/run/redis.sock",
        "redis+sentinel://h1,h2:26379/service",
        "redis+sentinel://u:p@h1,[fe80::1]:26379/service/2",
        "redis+cluster://h1,h2:7000",
        "memory://",
    ],
)
def test_every_documented_form_of_a_url_is_taken(url: str) -> None:
    assert check_store_url(url) == url
    assert Settings.from_env({"RETRYSAFE_REDIS_URL": url}).redis_url == url


@pytest.mark.parametrize(
    "url",
    [
        "redis:localhost",
        "redis://",
        "redis:///0",
        "redis://h1,h2",
        "redis://h:0",
        "redis://h:99999",
        "redis://h/name",
        "unix://run/redis.sock",
        "unix://",
        "redis+sentinel://h1,h2",
        "redis+sentinel://h1,,h2/s",
        "redis+cluster://h1/1",
        "memory://x",
        "REDIS://h",
    ],
)
def test_another_form_of_a_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        check_store_url(url)


def test_masking_leaves_a_text_without_secrets_as_it_is() -> None:
    assert masked("redis://h:6379/0?db=1") == "redis://h:6379/0?db=1"
    assert masked("redis://h?a=1&sentinel_password=x&b=2") == (
        "redis://h?a=1&sentinel_password=***&b=2"
    )


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("fixed:400ms", BackoffSpec("fixed", 0.4, None, False)),
        ("incremental:1s..30s", BackoffSpec("incremental", 1.0, 30.0, False)),
        ("exponential:100ms..10s", BackoffSpec("exponential", 0.1, 10.0, False)),
        ("full-jitter:100ms..10s", BackoffSpec("full-jitter", 0.1, 10.0, False)),
        ("immediate+equal-jitter:1s..1s", BackoffSpec("equal-jitter", 1.0, 1.0, True)),
    ],
)
def test_the_backoff_grammar_is_read(text: str, spec: BackoffSpec) -> None:
    assert parse_backoff(text) == spec
    assert Settings(retry_backoff=text).backoff == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fixed",
        "fixed:",
        "fixed:1s..2s",
        "linear:1s",
        "exponential:1s",
        "exponential:2s..1s",
        "exponential:0..1s",
        "exponential:1s..",
        "immediate+",
        "immediate+immediate+fixed:1s",
        "fixed:-1s",
    ],
)
def test_another_backoff_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_backoff(text)
    with pytest.raises(SettingsError, match="full-jitter:100ms"):
        Settings(retry_backoff=text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    {
        **{"250ms": 0.25, "30s": 30.0, "15m": 900.0, "24h": 86400.0, "7d": 604800.0},
        **{"1.5h": 5400.0, "30": 30.0, " 2s ": 2.0, "0": 0.0, "3ms": 0.003},
    }.items(),
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "s", "5 s", "5S", "5min", "-5s", "+5s", "1e3", ".5s", "5.s", "nan", "5s\n5", "1h30m"],
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        units.parse_duration(text)


@given(st.integers(1, 10**7), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_a_duration_reads_back_from_how_it_is_shown(number: int, unit: str) -> None:
    seconds = units.parse_duration(f"{number}{unit}")
    assert units.parse_duration(units.format_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "size"),
    {
        **{"10MiB": 10485760, "512KiB": 524288, "1GiB": 2**30, "7": 7, "7B": 7},
        **{"10MB": 10**7, "1.5KiB": 1536},
    }.items(),
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "10 MiB", "-1", "1.5B", "10M", "1e6", "MiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        units.parse_size(text)


def test_a_policy_takes_what_it_does_not_say_from_the_settings() -> None:
    policy = IdempotencyPolicy(lease=5).resolve(Settings(ttl=60, wait=3, require_key=True))
    assert (policy.ttl, policy.lease, policy.wait) == (60.0, 5.0, 3.0)
    assert policy.require_key is True
    assert (policy.on_abandoned, policy.on_lease_lost, policy.fingerprint) == (
        "rerun",
        "continue",
        "body",
    )
    assert policy.ttl_for(None) == policy.ttl_for(201) == 60.0


def test_a_policy_wins_over_the_settings_even_where_it_says_false_or_zero() -> None:
    policy = IdempotencyPolicy(require_key=False, wait=0).resolve(Settings(require_key=True))
    assert policy.require_key is False and policy.wait == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl", math.nan),
        ("ttl", "1h"),
        ("lease", 0),
        ("lease", True),
        ("wait", -1),
        ("on_abandoned", "ignore"),
        ("on_store_error", "ignore"),
        ("on_lease_lost", "stop"),
        ("require_key", "yes"),
        ("fingerprint", "hash"),
        ("keep", 200),
        ("applies", "/path"),
        ("max_request_body", -1),
        ("max_response_body", True),
    ],
)
def test_a_policy_with_a_fault_names_the_field(field: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"{field} holds .*; it takes "):
        IdempotencyPolicy(**{field: value})  # type: ignore[arg-type]


def test_I49_a_policy_whose_ttl_is_shorter_than_its_wait_or_lease_is_refused() -> None:
    with pytest.raises(SettingsError, match="shorter than wait"):
        IdempotencyPolicy(ttl=1, wait=2)
    with pytest.raises(SettingsError, match="shorter than lease"):
        IdempotencyPolicy(ttl=1, lease=2)
    with pytest.raises(SettingsError, match="shorter than wait"):
        IdempotencyPolicy(wait=100).resolve(Settings(ttl=60))


def test_a_short_ttl_said_in_a_policy_shortens_a_wait_and_lease_that_only_the_settings_say() -> (
    None
):
    policy = IdempotencyPolicy(ttl=1).resolve(Settings())
    assert (policy.ttl, policy.wait, policy.lease) == (1.0, 1.0, 1.0)


def test_a_ttl_may_depend_on_the_status() -> None:
    policy = IdempotencyPolicy(ttl=lambda status: 5.0 if status == 404 else 50.0)
    resolved = policy.resolve(Settings())
    assert (resolved.ttl_for(404), resolved.ttl_for(200)) == (5.0, 50.0)
    assert resolved.ttl_for(None) == 86400.0


@pytest.mark.parametrize(
    "bad", [lambda s: -1.0, lambda s: math.nan, lambda s: None, lambda s: 1 / 0]
)
def test_a_ttl_callable_that_fails_is_logged_and_the_record_kept(
    bad: object, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = IdempotencyPolicy(ttl=bad).resolve(Settings(ttl=90))  # type: ignore[arg-type]
    assert resolved.ttl_for(200) == 90.0
    assert "ttl(200) failed" in caplog.text


def test_what_a_recovery_function_returns_tells_done_from_not_done() -> None:
    assert Recovered(None) != None  # noqa: E711  (a recovered None is a result)
    assert Recovered({"id": 1}).result == {"id": 1}
