"""The n-gram proposer against a plain one, what is accepted of drafts, and how speculation is asked for."""

import argparse
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import pytest

from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError
from jaxpage.options import add_fields, config_of, read_config_file
from jaxpage.speculative.config import SpeculativeConfig
from jaxpage.speculative.drafts import count_accepted
from jaxpage.speculative.ngram import propose

K = 5


def plain_drafts(tokens: list[int], config: SpeculativeConfig) -> list[int]:
    """The longest match of the last tokens, the latest of equal ones, read on from."""
    for length in range(min(config.prompt_lookup_max, len(tokens) - 1), config.prompt_lookup_min - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                known = list(tokens)
                for place in range(config.num_speculative_tokens):
                    known.append(known[end + place])
                return known[len(tokens) :]
    return []


def device_drafts(
    known: list[list[int]], config: SpeculativeConfig, *, branch_free: bool = False, max_model_len: int = 1200
) -> list[list[int]]:
    rng = random.Random(1)
    left_over = [[*tokens, *(rng.randrange(3) for _ in range(max_model_len - len(tokens)))] for tokens in known]
    rows = jnp.arange(len(known))[::-1]
    lengths = jnp.array([len(tokens) for tokens in known])[::-1]
    run = jax.jit(propose, static_argnums=3, static_argnames="branch_free")
    drafts, found = run(jnp.array(left_over), rows, lengths, config, branch_free=branch_free)
    return [row if has else [] for row, has in zip(drafts.tolist(), found.tolist(), strict=True)][::-1]


@pytest.mark.parametrize("branch_free", [False, True])
@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 4), (2, 3), (5, 5)])
def test_drafts_are_what_followed_the_longest_and_latest_match(least: int, most: int, branch_free: bool) -> None:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=K, prompt_lookup_max=most, prompt_lookup_min=least
    )
    rng = random.Random(least * 10 + most)
    known = [[rng.randrange(size) for _ in range(rng.randint(1, 1100))] for size in [2, 3, 9, 40] * 6]
    known += [[1], [1, 1], [1, 2] * 3, [7] * 1100, [*range(1100)], [5, *range(600), 5], list(range(500, 520)) * 40]
    expected = [plain_drafts(tokens, config) for tokens in known]
    assert device_drafts(known, config, branch_free=branch_free) == expected
    assert {bool(drafts) for drafts in expected} == {False, True}


@pytest.mark.parametrize("branch_free", [False, True])
def test_rows_of_no_tokens_have_no_drafts(branch_free: bool) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=K)
    assert device_drafts([[], [1, 2, 1, 2]], config, branch_free=branch_free) == [[], [1, 2, 1, 2, 1]]


@pytest.mark.parametrize(
    ("drawn", "drafts", "num_drafts", "accepted"),
    [
        ([1, 5, 3, 4], [1, 2, 3], 3, 1),
        ([1, 2, 3, 4], [1, 2, 3], 3, 3),
        ([1, 2, 3, 4], [1, 2, 3], 2, 2),
        ([1, 2, 3, 4], [1, 2, 3], 0, 0),
        ([9, 2, 3, 4], [1, 2, 3], 3, 0),
        ([4], [], 0, 0),
    ],
)
def test_drafts_are_kept_up_to_the_first_that_differs(
    drawn: list[int], drafts: list[int], num_drafts: int, accepted: int
) -> None:
    arrays = jnp.array([drawn]), jnp.array([drafts], jnp.int32), jnp.array([num_drafts])
    assert count_accepted(*arrays).tolist() == [accepted]


GIVEN = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}


def test_speculation_is_asked_for_by_a_mapping_or_its_json_and_off_by_default() -> None:
    config = EngineConfig(speculative_config=GIVEN)  # type: ignore[arg-type]
    assert config.speculative_config == SpeculativeConfig(
        method="ngram", num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=2
    )
    assert EngineConfig(speculative_config=json.dumps(GIVEN)) == config  # type: ignore[arg-type]
    assert EngineConfig(speculative_config=str(config.speculative_config)) == config  # type: ignore[arg-type]
    assert (EngineConfig().speculative_config, EngineConfig().max_drafts, config.max_drafts) == (None, 0, 5)


def test_the_command_line_takes_json_and_a_config_file_a_mapping(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_fields(parser, EngineConfig)
    args = parser.parse_args(["--speculative-config", json.dumps(GIVEN)])
    config = config_of(EngineConfig, args)
    assert config.max_drafts == 5
    file = tmp_path / "config.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 5\n  prompt_lookup_max: 3\n")
    assert EngineConfig(**read_config_file(str(file), [EngineConfig])) == config
    file.write_text("speculative-config: ngram\n")
    with pytest.raises(ConfigError, match="speculative-config is 'ngram': it must be a mapping"):
        read_config_file(str(file), [EngineConfig])


def test_the_engines_process_is_told_how_to_speculate() -> None:
    config = EngineConfig(speculative_config=GIVEN)  # type: ignore[arg-type]
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_the_least_match_is_no_longer_than_a_longest_that_is_given_alone() -> None:
    config = EngineConfig(speculative_config=GIVEN | {"prompt_lookup_max": 1})  # type: ignore[arg-type]
    assert config.speculative_config is not None
    assert config.speculative_config.prompt_lookup_min == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "no JSON"),
        ("3", "must be a mapping"),
        (["ngram"], "must be a mapping"),
        ({"method": "ngram"}, "lacks num_speculative_tokens"),
        ({"num_speculative_tokens": 3}, "lacks method"),
        (GIVEN | {"method": "eagle"}, "method 'eagle': it must be ngram"),
        (GIVEN | {"model": "x"}, "'model', which is none of method, num_speculative_tokens"),
        (GIVEN | {"num_speculative_tokens": 0}, "num_speculative_tokens 0: it must be a whole number from 1 to 32"),
        (GIVEN | {"num_speculative_tokens": 33}, "num_speculative_tokens 33"),
        (GIVEN | {"num_speculative_tokens": True}, "num_speculative_tokens True"),
        (GIVEN | {"num_speculative_tokens": "5"}, "num_speculative_tokens '5'"),
        (GIVEN | {"prompt_lookup_max": 17}, "prompt_lookup_max 17: it must be a whole number from 1 to 16"),
        (GIVEN | {"prompt_lookup_max": None}, "prompt_lookup_max None"),
        (GIVEN | {"prompt_lookup_min": 4}, "prompt_lookup_min 4: it must be a whole number from 1 to 3"),
    ],
)
def test_what_is_wrong_with_a_speculative_config_is_named(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config") as error:
        EngineConfig(speculative_config=given)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_windows_have_room_for_the_drafts_of_all_steps_in_flight() -> None:
    assert EngineConfig(long_prefill_token_threshold=4).sized("cpu").max_step_tokens == 4
    config = EngineConfig(long_prefill_token_threshold=4, speculative_config=GIVEN)  # type: ignore[arg-type]
    assert config.sized("cpu").max_step_tokens == 1 + 2 * 5
