"""The command line: its options are the config's fields, and mistakes are one line."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from jaxpage.cli import _parser, main
from jaxpage.config import EngineConfig
from jaxpage.options import config_of
from jaxpage.server_config import ServerConfig


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_serve_has_an_option_for_every_field_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(output_of(capsys, "serve", "--help").split())
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)):
        assert "--" + field.name.replace("_", "-") in text
        if field.name != "model":  # which is also the command's argument
            assert field.metadata["help"].split(":")[0] in text


@pytest.mark.parametrize(
    "command",
    [["chat"], ["run-batch"], ["generate"], ["bench", "throughput"], ["bench", "latency"], ["bench", "startup"]],
)
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert "--max-num-seqs" in output_of(capsys, *command, "--help")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--prompt", "x", "--model", "no-such-model"], "no-such-model"),
        (["generate", "--prompt", "x", "--block-size", "24"], "--block-size is 24"),
        (["generate", "--prompt", "x", "--max-num-partial-prefills", "1"], "set --long-prefill-token-threshold"),
        (["generate", "--prompt", "x", "--temperature", "3"], "temperature is 3.0"),
        (["bench", "throughput", "--num-prompts", "0"], "--num-prompts is 0"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(arguments) != 0
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"], ["bench", "throughput"]])
def test_switches_and_values_reach_the_config(command: list[str]) -> None:
    def config(*arguments: str) -> EngineConfig:
        return config_of(EngineConfig, _parser().parse_args([*command, *arguments]))

    assert config().enable_prefix_caching
    assert not config("--no-enable-prefix-caching").enable_prefix_caching
    assert config("--no-enable-prefix-caching", "--enable-prefix-caching").enable_prefix_caching
    assert not config("--no-background-compile").background_compile
    assert config("--scheduling-policy", "priority").scheduling_policy == "priority"
    limited = config("--max-num-partial-prefills=2", "--long-prefill-token-threshold=64")
    assert (limited.max_num_partial_prefills, limited.long_prefill_token_threshold) == (2, 64)


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "jaxpage", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "generate" in done.stdout


def test_what_can_be_served_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "Qwen3ForCausalLM" in found["families"]["llama"]
    assert {"safetensors", "gguf"} <= found["formats"].keys()
    assert "smollm2-135m" in found["packaged"]
    assert main(["models"]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out


def test_the_bare_command_explains_itself_and_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"jaxpage \d+\.\d+\.\d+\S*", capsys.readouterr().out.strip())
