"""What a request asks of the text that it gets, in OpenAI's words and in vLLM's.

In: the fields of a request's body. Out: what the engine takes, or `RequestError` naming the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.errors import RequestError
from jaxpage.sampling_params import STRUCTURE_KINDS, StructuredOutputsParams

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


@dataclass(frozen=True, slots=True)
class Structure:
    """What is asked for, and the field that says so."""

    field: str
    params: StructuredOutputsParams


def structure_of(fields: Mapping[str, Any]) -> Structure | None:
    """The one thing that is asked for, if anything.

    fields: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`, as far as they are given.
    """
    found = [Structure(field, params) for field, value in fields.items() if (params := _read(field, value)) is not None]
    if len(found) > 1:
        names = " and ".join(structure.field for structure in found)
        raise RequestError(f"{names} each say what the text must be: give one of them", found[1].field)
    return found[0] if found else None


def structure_of_format(field: str, found: Any, other: Structure | None) -> Structure | None:
    """What the `format` in a field of the newer protocols asks for, where a schema stands beside its type.

    other: what the request's other fields ask for.
    """
    if found is None:
        return other
    if not isinstance(found, Mapping):
        raise RequestError(f"{field}.format is {found!r}: it must be an object with a type", field)
    flat = found.get("type") == "json_schema"
    try:
        params = _of_response_format({**found, "json_schema": found} if flat else found)
    except RequestError as error:
        name = "response_format.json_schema" if flat else "response_format"
        raise RequestError(str(error).replace(name, f"{field}.format"), field) from None
    if params is not None and other is not None:
        raise RequestError(f"{field} and {other.field} each say what the text must be: give one of them", field)
    return other if params is None else Structure(field, params)


def _read(field: str, value: Any) -> StructuredOutputsParams | None:
    try:
        match field:
            case "response_format":
                return _of_response_format(value)
            case "structured_outputs":
                return _of_structured(value)
            case _:
                return StructuredOutputsParams(**{field.removeprefix("guided_"): value})
    except RequestError as error:
        raise RequestError(str(error), field) from None


def _of_response_format(response_format: Mapping[str, Any]) -> StructuredOutputsParams | None:
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            wrapper = response_format.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
            if not isinstance(schema, Mapping | bool):
                raise RequestError("response_format.json_schema.schema is missing: it holds the JSON schema")
            return StructuredOutputsParams(json=dict(schema) if isinstance(schema, Mapping) else str(schema).lower())
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=dict(response_format))
        case kind:
            known = "text, json_object, json_schema or structural_tag"
            raise RequestError(f"response_format.type is {kind!r}: it must be {known}")


def _of_structured(structured: Mapping[str, Any]) -> StructuredOutputsParams:
    given = {name: value for name, value in structured.items() if value not in (None, False)}
    if unknown := sorted(given.keys() - set(STRUCTURE_KINDS)):
        raise RequestError(
            f"structured_outputs.{unknown[0]} is not supported: it may have one of {', '.join(STRUCTURE_KINDS)}"
        )
    return StructuredOutputsParams(**given)
