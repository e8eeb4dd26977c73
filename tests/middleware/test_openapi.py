"""What `document` adds to a schema, and what it leaves as it was."""

from __future__ import annotations

import copy
import json
from typing import Any

from fastapi import FastAPI, Header
from fastapi.openapi.utils import get_openapi

from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.middleware.openapi import document
from retrysafe.stores.memory import MemoryStore
from tests.asgi import post
from tests.support import run


def app() -> FastAPI:
    made = FastAPI()

    @made.post("/orders", responses={409: {"description": "Sold out."}})
    async def order() -> str:
        return "ok"

    @made.patch("/orders/{number}")
    async def change(number: int) -> str:
        return "ok"

    @made.put("/orders/{number}")
    async def replace(number: int) -> str:
        return "ok"

    return made


def named(operation: dict[str, Any]) -> list[str]:
    return [each["name"] for each in operation.get("parameters", [])]


def test_post_and_patch_are_documented_and_put_is_not() -> None:
    bare = copy.deepcopy(app().openapi())
    paths = document(copy.deepcopy(bare))["paths"]
    assert named(paths["/orders"]["post"]) == ["Idempotency-Key"]
    assert named(paths["/orders/{number}"]["patch"]) == ["number", "Idempotency-Key"]
    assert paths["/orders/{number}"]["put"] == bare["paths"]["/orders/{number}"]["put"]


def test_what_an_operation_documents_itself_is_kept() -> None:
    answers = document(app().openapi())["paths"]["/orders"]["post"]["responses"]
    assert answers["409"]["description"] == "Sold out."
    assert answers["200"]["content"]["application/json"]
    patched = document(app().openapi())["paths"]["/orders/{number}"]["patch"]["responses"]
    assert patched["422"]["description"] == "Validation Error"


def test_a_header_the_endpoint_declares_itself_is_not_documented_twice() -> None:
    made = FastAPI()

    @made.post("/orders")
    async def order(idempotency_key: str = Header()) -> str:
        return idempotency_key

    assert [n.lower() for n in named(document(made.openapi())["paths"]["/orders"]["post"])] == [
        "idempotency-key"
    ]


def test_methods_header_and_required_are_the_users() -> None:
    paths = document(app().openapi(), methods=["PUT"], header="X-Key", required=True)["paths"]
    [number, key] = paths["/orders/{number}"]["put"]["parameters"]
    assert number["name"] == "number"
    assert (key["name"], key["in"], key["required"]) == ("X-Key", "header", True)
    assert named(paths["/orders"]["post"]) == []


def test_a_schema_without_paths_is_no_error() -> None:
    assert "IdempotencyProblem" in document({})["components"]["schemas"]


def test_served_by_fastapi_the_document_describes_the_problem_that_is_sent() -> None:
    made = app()
    made.openapi = lambda: document(  # type: ignore[method-assign]
        get_openapi(title="shop", version="1", routes=made.routes)
    )
    made.add_middleware(IdempotencyMiddleware, store=MemoryStore("openapi"))

    async def main() -> None:
        for _ in range(2):
            served = json.loads((await post(made, "/openapi.json", method="GET", key=None)).body)
        problem = served["components"]["schemas"]["IdempotencyProblem"]
        answers = served["paths"]["/orders"]["post"]["responses"]
        refused = await post(made, "/orders", key="")
        sent = json.loads(refused.body)
        assert str(refused.status) in answers
        assert refused.header("content-type") in answers[str(refused.status)]["content"]
        assert set(problem["required"]) <= set(sent)
        kinds = {"string": str, "integer": int, "boolean": bool}
        for name, kind in problem["properties"].items():
            assert type(sent[name]) is kinds[kind["type"]]

    run(main())


def test_one_schema_never_changes_another() -> None:
    first = document(app().openapi())
    first["components"]["schemas"]["IdempotencyProblem"]["properties"]["mine"] = {}
    first["paths"]["/orders"]["post"]["parameters"][0]["description"] = "mine"
    patched = first["paths"]["/orders/{number}"]["patch"]["parameters"][1]
    second = document(app().openapi())
    assert "mine" not in second["components"]["schemas"]["IdempotencyProblem"]["properties"]
    assert patched["description"] != "mine"
