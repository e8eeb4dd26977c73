"""OpenAPI: the key header and the problems, documented on every keyed operation."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

_PROBLEM = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "example": "urn:retrysafe:problem:in-flight"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "request_id": {"type": "string"},
        "retryable": {"type": "boolean"},
    },
    "required": ["type", "title", "status", "detail", "request_id", "retryable"],
}
_ANSWERS = {
    "400": "The key is missing or can't be used.",
    "409": "In flight (retry after `Retry-After`), abandoned, or its result was not kept.",
    "413": "The body is too large.",
    "422": "The key was first used with another request.",
    "503": "The receipt can't be written; nothing was run.",
}
_MEDIA_TYPE = "application/problem+json"
_HEADER = {
    "Should-Retry": {
        "description": "Whether the same request may succeed later.",
        "schema": {"type": "string", "enum": ["true", "false"]},
    },
    "Retry-After": {
        "description": "Seconds until then.",
        "schema": {"type": "integer", "minimum": 1},
    },
}
_WITH_RETRY_AFTER = frozenset({"409", "503"})


def document(
    schema: dict[str, Any],
    *,
    methods: Iterable[str] = ("POST", "PATCH"),
    header: str = "Idempotency-Key",
    required: bool = False,
) -> dict[str, Any]:
    """Add the header and the problems to each keyed operation of an OpenAPI schema.

    Changes `schema` and returns it: `app.openapi = lambda: document(get_openapi(...))`. What an
    operation documents itself is kept: a status of its own (FastAPI's 422) gets the problem as one
    more media type.
    """
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas["IdempotencyProblem"] = deepcopy(_PROBLEM)
    parameter = {
        "name": header,
        "in": "header",
        "required": required,
        "description": "Makes the request safe to retry: the same key runs once.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    }
    content = {"schema": {"$ref": "#/components/schemas/IdempotencyProblem"}}
    for path in schema.get("paths", {}).values():
        for method in methods:
            operation = path.get(method.lower())
            if operation is None:
                continue
            parameters = operation.setdefault("parameters", [])
            if all(each.get("name", "").lower() != header.lower() for each in parameters):
                parameters.append(deepcopy(parameter))
            answers = operation.setdefault("responses", {})
            for status, description in _ANSWERS.items():
                answer = answers.setdefault(status, {"description": description})
                if "$ref" in answer:  # nothing may stand beside a reference
                    continue
                answer.setdefault("content", {}).setdefault(_MEDIA_TYPE, deepcopy(content))
                headers = answer.setdefault("headers", {})
                for name, header_object in _HEADER.items():
                    if name != "Retry-After" or status in _WITH_RETRY_AFTER:
                        headers.setdefault(name, deepcopy(header_object))
    return schema
