"""GET /openapi.json: what the server takes and gives, made from the same types that it reads and writes.

In: the table of routes. Out: an OpenAPI 3.1 document, the same for every server but for the routes it has.
"""

import functools
import importlib.metadata
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

if TYPE_CHECKING:
    from jaxpage.server.routes import ServedRoute

_REF = "#/components/schemas/{name}"
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "user", "assistant"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
    },
}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_FUNCTION: dict[str, Any] = {
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
}
_HINTS: dict[str, dict[str, Any]] = {
    "ChatRequest.tools": {
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"const": "function"}, "function": {"type": "object", **_FUNCTION}},
        }
    },
    "ResponsesRequest.tools": {
        "items": {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, **_FUNCTION["properties"]},
        }
    },
    "dimensions": {"minimum": 1},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "ResponsesRequest.input": {"items": _MESSAGE},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "max_tokens": {"minimum": 0},
    "messages": {"items": _MESSAGE, "minItems": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1, "maximum": 128},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "prompt_logprobs": {"minimum": -1, "maximum": 20},
    "repetition_penalty": {"minimum": 0.001, "maximum": 1000},
    "response_format": {
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": {"name": {"type": "string"}, "schema": {"type": ["object", "boolean"]}},
            },
        },
    },
    "stop_token_ids": {"items": {"type": "integer", "minimum": 0}},
    "structured_outputs": {
        "properties": {
            "json": {"type": ["object", "string"]},
            "regex": {"type": "string"},
            "choice": _TEXTS,
            "grammar": {"type": "string"},
            "json_object": {"type": "boolean"},
            "structural_tag": {"type": "object"},
        }
    },
    "temperature": {"minimum": 0, "maximum": 2},
    "tokens": {"items": {"type": "integer", "minimum": 0}},
    "top_k": {"minimum": -1},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
}
"""What fields of requests may be beyond their types: the engine checks it, and words what is wrong."""


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return JSONResponse(document(request.app.state.routes))


@functools.cache
def document(table: "tuple[ServedRoute, ...]") -> dict[str, Any]:
    """The document of the routes that are documented; not to be changed."""
    routes = [one for one in table if one.answer is not None]
    types = list(dict.fromkeys(found for one in routes for found in _types_of(one)))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    for body in {one.body for one in routes if one.body is not None}:
        properties = components[body.__name__]["properties"]
        for field in body.neutral.keys() & properties.keys():  # inherited, and refused
            del properties[field]
        for field, schema in properties.items():
            if (hint := _HINTS.get(f"{body.__name__}.{field}") or _HINTS.get(field)) is not None:
                _narrow(schema, hint)
    paths: dict[str, dict[str, Any]] = {}
    for one in routes:
        paths.setdefault(one.path.replace(":path", ""), {})[one.method.lower()] = _operation(one, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxpage", "version": importlib.metadata.version("jaxpage")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _narrow(schema: dict[str, Any], hint: dict[str, Any]) -> None:
    """Add `hint` to the variants of `schema` that it is about: lists, objects, or numbers."""
    kinds = ("array",) if "items" in hint else ("object",) if "properties" in hint else ("integer", "number")
    for variant in schema.get("anyOf", [schema]):
        if variant.get("type") in kinds:
            variant.update(hint)


def _types_of(one: "ServedRoute") -> list[Any]:
    body = [] if one.body is None else [one.body]
    return [one.answer, one.error, *body, *_events_of(one)]


def _events_of(one: "ServedRoute") -> tuple[Any, ...]:
    return () if one.event is None else typing.get_args(one.event) or (one.event,)


def _event(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One server-sent event, whose data is JSON of one of these schemas, or says that the stream ends."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": schemas}}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }


def _operation(one: "ServedRoute", schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    contents: dict[str, Any] = {"application/json": {"schema": schema_of[one.answer]}}
    if events := _events_of(one):
        contents["text/event-stream"] = {"schema": _event([schema_of[event] for event in [*events, one.error]])}
    found: dict[str, Any] = {
        "summary": one.summary,
        "responses": {
            "200": {"description": "the answer", "content": contents},
            "default": {
                "description": "why there is none",
                "content": {"application/json": {"schema": schema_of[one.error]}},
            },
        },
    }
    if parameters := _parameters(one.path.replace(":path", "").split("/")):
        found["parameters"] = parameters
    if one.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[one.body]}}}
    return found


def _parameters(parts: Sequence[str]) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in parts if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
