"""SmolLM2 at temperature 1 within grammars: what it finishes is valid, whatever it would rather write."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
from real_models import Model, open_model

from jaxpage import RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from jaxpage.engine.loops import LOOPS

NUM_SEEDS, FULL_NUM_SEEDS = 1, 20

A13 = {
    "type": "object",
    "properties": {
        "größe": {"$ref": "#/$defs/S"},
        "n": {"type": "integer", "minimum": -3, "maximum": 17},
        "t": {"$ref": "#/$defs/N"},
    },
    "required": ["größe", "n"],
    "additionalProperties": False,
    "$defs": {
        "S": {"enum": ["klein", "groß", 3, None]},
        "N": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "kids": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/N"}},
            },
            "required": ["v"],
            "additionalProperties": False,
        },
    },
}
CLOSED = {"type": "object", "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "type": {"type": ["boolean", "null"]},
    "boolean": {"type": "boolean"},
    "enum": {"enum": ["red", "🦙漢字é", 7, None, [1, "a"], {"k": True}]},
    "const": {"const": {"a": [1, 2.5]}},
    "minimum, maximum": {"type": "integer", "minimum": -3, "maximum": 17},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "format date": {"type": "string", "format": "date"},
    "format uuid": {"type": "string", "format": "uuid"},
    "format ipv4": {"type": "string", "format": "ipv4"},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["x", "y"]}], "items": False},
    "properties": CLOSED | {"properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "required": ["a"]},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "patternProperties": CLOSED | {"patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "maxProperties": 2},
    "anyOf": {"anyOf": [{"type": "boolean"}, CLOSED | {"properties": {"x": {"const": 1}}, "required": ["x"]}]},
    "oneOf": {"oneOf": [{"const": "a"}, {"type": "array", "maxItems": 0}]},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"enum": [1, 2]}}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    "$ref, recursive": A13,
    "nested": CLOSED
    | {
        "properties": {"p": CLOSED | {"properties": {"q": {"type": "array", "items": {"enum": [0]}, "maxItems": 3}}}},
        "required": ["p"],
    },
}
UNSUPPORTED = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
}
PROMPT = "The answer in JSON, as short as can be:\n"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with open_model("smollm2-135m") as model:
        yield model


def within(structured: StructuredOutputsParams, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1, "max_tokens": 100} | options), structured_outputs=structured)


def generate(model: Model, prompts: str | Sequence[str], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    return model.llm.generate([prompts] * len(params) if isinstance(prompts, str) else prompts, params, use_tqdm=False)


def test_what_is_finished_of_every_keyword_validates(model: Model, full: bool) -> None:
    drawn = [(keyword, seed) for seed in range(FULL_NUM_SEEDS if full else NUM_SEEDS) for keyword in SCHEMAS]
    params = [within(StructuredOutputsParams(json=SCHEMAS[keyword]), seed=seed) for keyword, seed in drawn]
    finished: dict[str, int] = dict.fromkeys(SCHEMAS, 0)
    for (keyword, _), output in zip(drawn, generate(model, PROMPT, params), strict=True):
        (sequence,) = output.outputs
        if sequence.finish_reason == "stop":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(json.loads(sequence.text), SCHEMAS[keyword], format_checker=checker)
            finished[keyword] += 1
    assert sum(finished.values()) > 0.9 * len(drawn), finished
    assert model.core.scheduler.kv_cache.pool.usage == 0


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_a_keyword_that_cannot_be_honoured_is_refused_by_name(model: Model, keyword: str) -> None:
    with pytest.raises(RequestError, match=keyword):
        generate(model, PROMPT, [within(StructuredOutputsParams(json=UNSUPPORTED[keyword]))])


def test_a13_a_wish_for_white_space_still_ends_in_valid_json(model: Model) -> None:
    tokenizer = model.llm.tokenizer
    blanks = {tokenizer.encode(text, add_special_tokens=False)[0]: 100.0 for text in (" ", "\n")}
    params = within(StructuredOutputsParams(json=A13), temperature=0, logit_bias=blanks, max_tokens=200)
    (output,) = generate(model, PROMPT, [params])
    assert output.outputs[0].finish_reason == "stop"
    jsonschema.validate(json.loads(output.outputs[0].text), A13)
    assert output.outputs[0].text.count("\n") > 50, "the wish was there"


def test_a09_an_enum_of_many_bytes_comes_out_whole(model: Model) -> None:
    params = within(StructuredOutputsParams(json={"enum": ["🦙漢字é"]}))
    assert json.loads(generate(model, PROMPT, [params])[0].outputs[0].text) == "🦙漢字é"


def test_every_other_kind_holds(model: Model) -> None:
    tag = {
        "structures": [{"begin": "<a>", "schema": {"type": "boolean"}, "end": "</a>"}],
        "triggers": ["<a>"],
    }
    kinds = {
        StructuredOutputsParams(regex=r"[a-z]{3}-\d{2}"): r"[a-z]{3}-\d{2}",
        StructuredOutputsParams(choice=("yes", "no", "not at all")): "yes|no|not at all",
        StructuredOutputsParams(grammar='start: "x" ("y" | "z"){2,3}'): "x[yz]{2,3}",
        StructuredOutputsParams(grammar='root ::= ("ab" | "c")+ "!"'): "(ab|c)+!",
        StructuredOutputsParams(structural_tag=tag): "((?!<a>)(.|\n))*(<a>(true|false)</a>((?!<a>)(.|\n))*)*",
    }
    params = [within(kind, seed=seed, max_tokens=30) for kind in kinds for seed in range(2)]
    outputs = generate(model, "Write: <a>true</a> <a>", params)
    for output, pattern in zip(outputs, (pattern for pattern in kinds.values() for _ in range(2)), strict=True):
        if output.outputs[0].finish_reason == "stop":
            assert re.fullmatch(pattern, output.outputs[0].text), output.outputs[0].text
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 6


def test_the_grammar_holds_before_other_options_that_leave_nothing(model: Model) -> None:
    yes, no, letter = (model.llm.tokenizer.encode(text, add_special_tokens=False) for text in ("yes", "no", "n"))
    choice = StructuredOutputsParams(choice=("yes", "no"))
    biased = within(choice, temperature=0, logit_bias={no[0]: -100.0, letter[0]: -100.0})
    other = within(choice, temperature=0, allowed_token_ids=(yes[0] + 1, no[0] + 1))
    too_short = within(choice, temperature=0, min_tokens=20)
    ignoring = within(StructuredOutputsParams(regex="a{1,3}"), temperature=0, ignore_eos=True)
    outputs = generate(model, "Yes or no?", [biased, other, too_short, ignoring])
    texts = [output.outputs[0].text for output in outputs]
    assert texts[0] == "yes"
    assert texts[1] in ("yes", "no")
    assert texts[2] in ("yes", "no")
    assert texts[3] == "aaa", "ends where nothing may follow, and not before"
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_rows_without_a_grammar_are_the_same_beside_one(model: Model) -> None:
    plain = [SamplingParams(temperature=1, seed=seed, max_tokens=12, logprobs=2) for seed in range(3)]
    alone = generate(model, "A tale:", plain)
    structured = within(StructuredOutputsParams(json=A13), seed=5, logprobs=2)
    beside = generate(model, ["A tale:"] * 3 + [PROMPT], [*plain, structured])
    for before, after in zip(alone, beside, strict=False):
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert after.outputs[0].cumulative_logprob == pytest.approx(before.outputs[0].cumulative_logprob, abs=1e-3)
    sequence = beside[-1].outputs[0]
    assert sequence.logprobs is not None
    for token_id, entry in zip(sequence.token_ids, sequence.logprobs, strict=True):
        assert token_id in entry, "the token drawn within the grammar is reported"
        assert len(entry) in (2, 3)


def test_n_choices_and_preemption_give_what_each_gives_alone(model: Model) -> None:
    params = within(StructuredOutputsParams(json=A13), seed=3, n=3, max_tokens=30)
    singles = [within(StructuredOutputsParams(json=A13), seed=3 + index, max_tokens=30) for index in range(3)]
    with model.host(caching=True):
        expected = [output.outputs[0].token_ids for output in generate(model, PROMPT, singles)]
    for mode in LOOPS:
        with model.host(caching=True, num_blocks=model.case.tiny_pool, mode=mode) as scheduler:
            (forked,) = generate(model, PROMPT, [params])
            assert [sequence.token_ids for sequence in forked.outputs] == expected
            assert scheduler.num_preemptions > 0
