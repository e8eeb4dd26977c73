"""A payment endpoint that is safe to retry, and a recovery function for a worker that died.

Run it: `python examples/payments.py`. It needs no server: receipts are in memory here; in
production set RETRYSAFE_REDIS_URL and leave `store` out.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from retrysafe import IdempotencyPolicy, Recovered, current_request
from retrysafe.middleware import IdempotencyMiddleware, RequestIdMiddleware
from retrysafe.records import AbandonedReceipt
from retrysafe.testing import memory_store

ledger: dict[str, int] = {}


async def pay(request: Request) -> JSONResponse:
    """Move the money under the key's digest: what a recovery function can look for later."""
    context = current_request()
    assert context is not None
    order = await request.json()
    if order["cents"] <= 0:
        return JSONResponse({"error": "nothing to pay"}, status_code=422)  # not kept: may be fixed
    ledger[context.request_id] = order["cents"]
    return JSONResponse({"paid": order["cents"]}, status_code=201)


def look_in_the_ledger(receipt: AbandonedReceipt) -> Recovered | None:
    """A worker died with this receipt: did it pay? If so, this is its answer; if not, run."""
    cents = ledger.get(receipt.request_id)
    return None if cents is None else Recovered(JSONResponse({"paid": cents}, status_code=201))


app = Starlette(routes=[Route("/payments", pay, methods=["POST"])])
app.add_middleware(
    IdempotencyMiddleware,
    policy=IdempotencyPolicy(require_key=True, on_abandoned=look_in_the_ledger),
    store=memory_store(),
)
app.add_middleware(RequestIdMiddleware)


if __name__ == "__main__":
    client = TestClient(app)
    key = {"Idempotency-Key": "order-17"}
    first = client.post("/payments", json={"cents": 1000}, headers=key)
    retry = client.post("/payments", json={"cents": 1000}, headers=key)
    assert first.json() == retry.json() == {"paid": 1000}
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert list(ledger.values()) == [1000]
    other = client.post("/payments", json={"cents": 2000}, headers=key)
    assert other.status_code == 422
    print("paid once, answered twice; another payload was refused:", other.json()["detail"])
