"""Engine and server options: the edges of what is accepted, and what a refusal says."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from jaxpage.config import EngineConfig, flag
from jaxpage.errors import ConfigError
from jaxpage.options import read_config_file
from jaxpage.server_config import ServerConfig

ENGINE_ACCEPTED: list[tuple[str, list[Any]]] = [
    ("dtype", ["auto", "float32", "bfloat16"]),
    ("max_model_len", [None, 1, 8192]),
    ("block_size", [1, 2, 16, 256]),
    ("num_blocks", [None, 2, 100_000]),
    ("kv_memory_fraction", [None, 0.001, 0.9, 1, 1.0]),
    ("max_num_seqs", [None, 1, 512]),
    ("max_num_batched_tokens", [None, 1, 64, 65_536]),
    ("long_prefill_token_threshold", [0, 1, 400]),
    ("max_num_partial_prefills", [0]),
    ("scheduling_policy", ["fcfs", "priority", "package.module:Class"]),
    ("enable_prefix_caching", [True, False]),
]
ENGINE_REFUSED: list[tuple[str, list[Any]]] = [
    ("dtype", ["float16", "", "f32"]),
    ("max_model_len", [0, -5]),
    ("block_size", [0, -16, 3, 12, 24]),
    ("num_blocks", [0, 1, -2]),
    ("kv_memory_fraction", [0, -0.5, 1.001, 90, float("nan")]),
    ("max_num_seqs", [0, -1]),
    ("max_num_batched_tokens", [0, -512]),
    ("long_prefill_token_threshold", [-1]),
    ("max_num_partial_prefills", [-1, 1]),
]


def cases(table: list[tuple[str, list[Any]]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table for value in values]


@pytest.mark.parametrize(("name", "value"), cases(ENGINE_ACCEPTED))
def test_an_engine_option_up_to_the_edge_is_accepted(name: str, value: Any) -> None:
    assert getattr(EngineConfig(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), cases(ENGINE_REFUSED))
def test_an_engine_option_beyond_the_edge_is_refused_by_flag_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    shown = repr(value) if isinstance(value, str) else str(value)
    assert str(caught.value).startswith(f"--{name.replace('_', '-')} is {shown}")


def test_a_step_must_have_a_token_for_every_request() -> None:
    assert EngineConfig(max_num_seqs=8, max_num_batched_tokens=8).max_num_batched_tokens == 8
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_num_seqs=9, max_num_batched_tokens=8)
    message = str(caught.value)
    assert "--max-num-batched-tokens is 8" in message
    assert "--max-num-seqs 9" in message
    assert "raise it, or lower --max-num-seqs" in message


def test_a_limit_of_long_prompts_needs_to_know_what_is_long() -> None:
    config = EngineConfig(max_num_partial_prefills=2, long_prefill_token_threshold=64).sized("cpu")
    assert (config.max_num_partial_prefills, config.max_step_tokens) == (2, 64)
    with pytest.raises(ConfigError, match="set --long-prefill-token-threshold, too"):
        EngineConfig(max_num_partial_prefills=1)


@pytest.mark.parametrize(("threshold", "most"), [(0, 128), (1, 1), (127, 127), (128, 128), (500, 128)])
def test_a_request_gets_no_more_of_a_step_than_threshold_and_budget_allow(threshold: int, most: int) -> None:
    config = EngineConfig(max_num_batched_tokens=128, long_prefill_token_threshold=threshold).sized("cpu")
    assert config.max_step_tokens == most


def test_a_refused_block_size_comes_with_sizes_that_work() -> None:
    with pytest.raises(ConfigError, match="a power of two, such as 16 or 32"):
        EngineConfig(block_size=24)


@pytest.mark.parametrize(
    "options",
    [
        {"port": 0},
        {"port": 65535},
        {"shutdown_timeout": 0},
        {"shutdown_timeout": 60.0},
        {"root_path": "/llm/v2"},
        {"max_request_bytes": 1},
        {"max_num_waiting": 0},
        {"max_stored_responses": 0},
        {"request_timeout": 0.001},
        {"allowed_origins": ("https://a.example",), "allow_credentials": True},
    ],
)
def test_a_server_option_up_to_the_edge_is_accepted(options: dict[str, Any]) -> None:
    assert dataclasses.asdict(ServerConfig(**options)).items() >= options.items()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": -1}, "--port is -1: it must be in [0, 65535]"),
        ({"port": 65536}, "--port is 65536: it must be in [0, 65535]"),
        ({"root_path": "llm"}, "--root-path is 'llm': it must start with / and not end with it"),
        ({"root_path": "/"}, "--root-path is '/': it must start with / and not end with it"),
        ({"ssl_keyfile": "k.pem"}, "--ssl-keyfile is given without its certificate: set --ssl-certfile, too"),
        ({"api_key": ("a", " ")}, "--api-key holds an empty text: leave it out"),
        ({"served_model_name": ("",)}, "--served-model-name holds an empty text: leave it out"),
        ({"max_request_bytes": 0}, "--max-request-bytes is 0: it must be at least 1"),
        ({"max_num_waiting": -1}, "--max-num-waiting is -1: it must be at least 0"),
        ({"max_stored_responses": -1}, "--max-stored-responses is -1: it must be at least 0"),
        ({"request_timeout": 0}, "--request-timeout is 0: it must be more than 0 seconds"),
        ({"request_timeout": float("nan")}, "--request-timeout is nan: it must be more than 0 seconds"),
        (
            {"allow_credentials": True},
            "--allow-credentials with --allowed-origins '*' lets every page on the web act as its reader: name the "
            "origins",
        ),
        ({"shutdown_timeout": -0.5}, "--shutdown-timeout is -0.5: it must be at least 0 seconds"),
    ],
)
def test_a_server_option_beyond_the_edge_is_refused_by_flag_value_and_limit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert str(caught.value) == said


@pytest.mark.parametrize("config", [EngineConfig(), ServerConfig()])
def test_options_are_frozen_and_each_explains_itself(config: EngineConfig | ServerConfig) -> None:
    for field in dataclasses.fields(config):
        assert field.metadata["help"]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))


def test_options_are_given_by_name_only() -> None:
    with pytest.raises(TypeError):
        EngineConfig("smollm2-135m")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value", "must_be"),
    [
        ("max_num_seqs", 2.5, "a whole number"),
        ("max_num_seqs", True, "a whole number"),
        ("max_model_len", "3", "a whole number"),
        ("seed", "x", "a whole number"),
        ("enable_prefix_caching", "false", "true or false"),
        ("enable_prefix_caching", 1, "true or false"),
        ("kv_memory_fraction", "0.5", "a number"),
        ("dtype", 32, "a text"),
        ("model", None, "a text"),
        ("logits_processors", [1], "a list of texts"),
    ],
)
def test_values_from_python_are_of_the_options_type(name: str, value: Any, must_be: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag(name)} is {re.escape(repr(value))}: it must be {must_be}"):
        EngineConfig(**{name: value})


def test_values_of_a_near_type_are_taken(tmp_path: Path) -> None:
    config = EngineConfig(model=tmp_path, kv_memory_fraction=1, logits_processors=["a:b"])  # type: ignore[arg-type]
    assert (config.model, config.kv_memory_fraction, config.logits_processors) == (str(tmp_path), 1.0, ("a:b",))


def test_a_secret_of_another_type_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"^--api-key must be a list of texts$"):
        ServerConfig(api_key=(7,))  # type: ignore[arg-type]


def test_a_key_with_a_slip_says_what_may_be_meant(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("max-num-seq: 3")
    with pytest.raises(ConfigError, match=r"'max-num-seq', which is no option; did you mean max-num-seqs\?"):
        read_config_file(str(tmp_path / "c.yaml"), (EngineConfig, ServerConfig))
