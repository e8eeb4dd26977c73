"""The names that programs import: one more or one less is a decision, not an accident."""

from __future__ import annotations

import retrysafe
from retrysafe import decorators, errors, middleware, stores, testing


def test_the_exported_names_are_these() -> None:
    assert set(retrysafe.__all__) == {
        "AsyncReceipts",
        "Attempt",
        "BreakerPolicy",
        "Call",
        "CircuitBreaker",
        "Classification",
        "EqualJitter",
        "Exponential",
        "Fixed",
        "FullJitter",
        "IdempotencyPolicy",
        "Immediate",
        "Incremental",
        "JobBudget",
        "Outcome",
        "Permit",
        "Receipt",
        "Receipts",
        "Recovered",
        "RequestContext",
        "Reservation",
        "ResultReader",
        "ResultWriter",
        "RetryBudget",
        "RetryPolicy",
        "Saga",
        "Settings",
        "Submission",
        "attempts_of",
        "classify",
        "current_request",
        "deadline",
        "errors",
        "open_store",
        "request_id",
        "run_job",
    }
    assert set(middleware.__all__) == {
        "IdempotencyMiddleware",
        "RequestIdMiddleware",
        "idempotency",
    }
    assert set(decorators.__all__) == {"circuit_breaker", "idempotent", "retry", "step"}
    assert set(testing.__all__) == {"DuplicateClient", "FakeClock", "instant", "memory_store"}
    assert set(stores.__all__) == {"AsyncBackend", "Backend", "Store", "open_store"}
    for module in (retrysafe, middleware, decorators, testing, stores):
        for name in module.__all__:
            assert hasattr(module, name)


def test_every_error_is_ours_picklable_and_says_what_it_knows() -> None:
    import pickle

    made = [
        errors.SettingsError(["LEASE holds 'x'; it takes a duration"]),
        errors.KeyInvalid("empty"),
        errors.KeyMissing("Idempotency-Key"),
        errors.InFlight("ab", 2.5),
        errors.Reentered("ab", 2.5),
        errors.Abandoned("ab"),
        errors.FingerprintMismatch("ab"),
        errors.ResultNotKept("ab"),
        errors.StoreUnavailable("ab", "gone", 1.5),
        errors.RecordCorrupt("ab", "cut"),
        errors.RecordSealed("ab", "another key"),
        errors.NotEncodable("a socket can't be stored"),
        errors.NoKeyedWork("charge"),
        errors.SagaStepError("pay", "ValueError", "no"),
        errors.SagaFailed("order", "17", "pay", done=("a",), parked=("b",), errors={"b": "x"}),
        errors.SagaNotFound("order", "17"),
        errors.SagaChanged("order", "17", "step 'a' has no undo here"),
        errors.OutOfStock("seat", 2, 1),
        errors.ReservationExpired("seat", "h"),
        errors.ReservationConfirmed("seat", "h"),
        errors.UnknownItem("seat"),
        errors.BreakerOpen("pay", 3.0),
        errors.StepFailed("s", "n1", "no memory", True),
        errors.ProtocolError("s", "n1", "not JSON", b"\xff"),
        errors.AlreadyTaken("j"),
        errors.JobTaken("job-1", "render", 2),
        errors.JobGivenUp("job-1", "render"),
        errors.ResultTimeout("j", 5.0, 2),
    ]
    classes = {
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.RetrySafeError)
    }
    assert {type(each) for each in made} | {errors.RetrySafeError, errors.ReceiptError} == classes
    for error in made:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (str(copy), vars(copy)) == (str(error), vars(error))
        assert str(error)
    (raw,) = (each for each in made if isinstance(each, errors.ProtocolError))
    assert "ff" not in repr(raw)
