"""Requests made up from the OpenAPI document that a server gives of itself, and what must hold of its answers.

`python tests/server/fuzzing.py URL NUM_REQUESTS` does so with a server that runs already.
"""

import copy
import random
import sys
from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
GUARD_SECONDS = 60.0
NUM_OPTIONS = 4
"""Fields that a request may have besides those it must have: with more, hardly one would be right in all of them."""
NUM_EXAMPLES = 14
"""Requests with the same choice of fields."""


def fuzz(url: str, num_requests: int) -> Counter[tuple[str, int]]:
    """How often each operation answered with which status. Fails on a 5xx, or what the document does not promise.

    The same requests each time, half of which are valid by the schema.
    """
    document = requests.get(f"{url}/openapi.json", timeout=GUARD_SECONDS).json()
    seen: Counter[tuple[str, int]] = Counter()
    rng = random.Random(0)
    with requests.Session() as session:

        def ask(case: schemathesis.Case) -> None:
            response = case.call(base_url=url, session=session, timeout=GUARD_SECONDS)
            seen[case.operation.label, response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        round_number = 0
        while seen.total() < num_requests:
            schema = schemathesis.openapi.from_dict(_with_few_options(document, rng))
            for operation in [found.ok() for found in schema.get_all_operations()]:
                if round_number and not operation.body:
                    continue  # there is little to vary
                mode = list(GenerationMode)[round_number % 2] if operation.body else GenerationMode.POSITIVE
                options = settings(
                    max_examples=NUM_EXAMPLES,
                    database=None,
                    deadline=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                cases = operation.as_strategy(generation_mode=mode)
                seed(round_number)(options(given(case=cases)(ask)))()
            round_number += 1
    return seen


def _with_few_options(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The document with a few of the fields that requests may have."""
    chosen = copy.deepcopy(document)
    for name, schema in chosen["components"]["schemas"].items():
        if name.endswith("Request"):
            needed = schema.get("required", [])
            others = sorted(schema["properties"].keys() - {*needed, "model"})
            kept = {*needed, *rng.sample(others, min(NUM_OPTIONS, len(others)))}
            schema["properties"] = {field: schema["properties"][field] for field in kept}
            _make_small(schema)
    return chosen


def _make_small(schema: Any) -> None:
    """Keep what is made up from `schema` short: what is long takes long to make up, and is refused as too long."""
    if isinstance(schema, list):
        for one in schema:
            _make_small(one)
    elif isinstance(schema, dict):
        limits = {"array": {"maxItems": 3}, "string": {"maxLength": 12}, "object": {"maxProperties": 6}}
        schema.update(limits.get(schema.get("type"), {}) if isinstance(schema.get("type"), str) else {})
        if "properties" in schema:
            schema["additionalProperties"] = False
        for value in schema.values():
            _make_small(value)


if __name__ == "__main__":
    for (label, status), count in sorted(fuzz(sys.argv[1], int(sys.argv[2])).items()):
        print(f"{count:6} {status} {label}")
