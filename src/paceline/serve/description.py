"""What the OpenAPI page says of requests and answers that FastAPI does not parse itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.serve.fields import Field
from paceline.serve.settings import JSON, SAFETENSORS

TEXT = "Answers requests with a model, and follows its training. Every result names the version that made it."

MOST = (1 << 63) - 1  # that a message can carry
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_SAID = {JSON: {"schema": _ERROR}}
_BINARY = {"schema": {"type": "string", "format": "binary"}}


def _refusals(*pairs: tuple[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": text, "content": _SAID} for status, text in pairs}


ANYWHERE = _refusals(
    (408, "The request has not come to its end in time"), (421, "There is no token, and Host is no name of this host")
)
ANSWERS = _refusals(
    (400, "The body cannot be read"),
    (401, "The token is missing or wrong"),
    (406, "No such kind of answer"),
    (413, "Too many bytes, or too many items"),
    (415, "No such kind of body"),
    (422, "The body has another shape or type than the model takes"),
    (429, "Too many requests wait: Retry-After says when to ask again"),
    (500, "The model failed"),
    (503, "Not ready, or about to end: Retry-After says when to ask again"),
    (504, "The deadline has passed"),
)
NOT_READY = _refusals((503, "No version is loaded yet"))
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Counts", "content": {"text/plain": {"schema": {"type": "string"}}}},
    **_refusals((401, "The token is missing or wrong"), (503, "The parent does not answer")),
}
VERSIONS: dict[int | str, dict[str, Any]] = {
    200: {"description": "How versions stand", "content": {JSON: {"schema": {"type": "object"}}}},
    **_refusals((401, "The token is missing or wrong"), (503, "The parent does not answer")),
}
ORDERED = {
    **VERSIONS,
    **_refusals(
        (400, "The body cannot be read"),
        (403, "Asked by a page of another site"),
        (409, "The order cannot be followed"),
        (413, "Too many bytes"),
        (422, "The body has another shape"),
    ),
}
LEARN = {
    202: {"description": "Taken, and how many wait for the run", "content": {JSON: {"schema": {"type": "object"}}}},
    **_refusals(
        (400, "The body cannot be read"),
        (401, "The token is missing or wrong"),
        (403, "Asked by a page of another site"),
        (409, "What is served is no run, so nothing can learn"),
        (413, "Too many bytes, or too many items"),
        (415, "No such kind of body"),
        (422, "The body has another shape or type, values that are not finite, or classes that there are not"),
        (429, "Too many samples wait: Retry-After says when to ask again"),
        (503, "Not ready, or the run takes no samples: Retry-After says when to ask again"),
    ),
}
PIN = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "properties": {"version": {"type": "integer", "minimum": 1, "maximum": MOST}},
                    "required": ["version"],
                    "additionalProperties": False,
                }
            }
        },
    }
}


def body(inputs: Sequence[Field], outputs: Sequence[Field]) -> dict[str, Any]:
    """The request of /predict, for a model with these fields; without any, before they are known."""
    inner = _inputs(inputs)
    deadline = {
        "name": "X-Paceline-Deadline-Ms",
        "in": "header",
        "required": False,
        "description": "Milliseconds after which the answer is of no use",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }
    return {
        "parameters": [deadline],
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": _object({"inputs": inner})}, SAFETENSORS: _BINARY},
        },
    }


def labelled(inputs: Sequence[Field], label: Field) -> dict[str, Any]:
    """The request of /learn."""
    schema = _object({"inputs": _inputs(inputs), label.name: _items(label)})
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}, SAFETENSORS: _BINARY}}}


def result(outputs: Sequence[Field]) -> dict[str, Any]:
    """The answer of /predict that has a result."""
    named = {field.name: _items(field, out=True) for field in outputs}
    inner = named["outputs"] if list(named) == ["outputs"] else _object(named)
    content = {JSON: {"schema": _object({"outputs": inner, "version": {"type": "integer"}})}, SAFETENSORS: _BINARY}
    header = {"description": "The version that made the result", "schema": {"type": "integer"}}
    return {"description": "Results, item by item", "content": content, "headers": {"X-Paceline-Version": header}}


def _inputs(fields: Sequence[Field]) -> dict[str, Any]:
    if len(fields) == 1:
        return _items(fields[0])
    return _object({field.name: _items(field) for field in fields}) if fields else {}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _items(field: Field, *, out: bool = False) -> dict[str, Any]:
    """JSON has no nan and no infinity: a result that is one goes out as null."""
    words = {float: ["number", "null"] if out else "number", int: "integer", bool: "boolean"}
    schema: dict[str, Any] = {"type": words[field.kind]}
    for size in reversed(field.shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return {"type": "array", "items": schema, "minItems": 1}
