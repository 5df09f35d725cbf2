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
