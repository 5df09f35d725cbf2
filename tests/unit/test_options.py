"""From config fields to options of the command line and keys of a YAML file."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from jaxpage import cli
from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError
from jaxpage.options import add_fields, config_of, read_config_file
from jaxpage.server_config import ServerConfig


def server_config(*arguments: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_fields(parser, ServerConfig)
    return config_of(ServerConfig, parser.parse_args(arguments))


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    return read_config_file(str(file), (EngineConfig, ServerConfig))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--served-model-name", "a", "--served-model-name", "b", "--served-model-name=c"],
        ["--served-model-name", "a, b,c"],
        ["--served-model-name", "a", "b", "c"],
        ["--served-model-name", '["a", "b"]', "--served-model-name", "c"],
    ],
)
def test_a_list_is_repeated_or_separated_by_commas_or_json(arguments: list[str]) -> None:
    assert server_config(*arguments).served_model_name == ("a", "b", "c")


def test_a_list_is_its_default_unless_given_and_may_be_made_empty() -> None:
    assert server_config().allowed_origins == ("*",)
    assert server_config("--allowed-origins", "").allowed_origins == ()
    assert server_config("--allowed-origins", "https://a.example").allowed_origins == ("https://a.example",)


@pytest.mark.parametrize("value", ["[1]", "[not json"])
def test_a_bad_json_list_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        server_config("--served-model-name", value)
    assert value in capsys.readouterr().err


def test_a_file_holds_options_by_name_with_dashes_or_underscores(tmp_path: Path) -> None:
    text = "port: 9000\nmax-num-seqs: 4\nserved_model_name: [a, b]\nshutdown-timeout: 3\nweb-page: false\nmodel: m\n"
    assert read(tmp_path, text) == {
        "port": 9000,
        "max_num_seqs": 4,
        "served_model_name": ("a", "b"),
        "shutdown_timeout": 3.0,
        "web_page": False,
        "model": "m",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "'prot', which is no option"),
        ("config: x", "'config', which is no option"),
        ("port: eight", "port is 'eight': it must be a whole number"),
        ("port: true", "port is True: it must be a whole number"),
        ("port: null", "port is None"),
        ("web-page: 1", "web-page is 1: it must be true or false"),
        ("host: 1", "host is 1: it must be a text"),
        ("shutdown-timeout: soon", "it must be a number"),
        ("api-key: [1]", "it must be a list of texts"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "twice"),
        ("- port", "holds no options"),
        ("", "holds no options"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_files_mistake_is_told_with_file_key_and_value(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert f"--config {tmp_path / 'options.yaml'}" in str(caught.value)
    assert says in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config_file(str(tmp_path / "none.yaml"), (ServerConfig,))


@pytest.fixture
def served_with(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """The configs with which `jaxpage serve` would have started a server."""
    seen: list[tuple[EngineConfig, ServerConfig]] = []

    def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
        seen.append((engine_config, config))
        return 0

    monkeypatch.setattr("jaxpage.server.serve.serve", serve)
    return seen


def test_the_command_line_goes_before_the_file(
    tmp_path: Path, served_with: list[tuple[EngineConfig, ServerConfig]]
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("port: 9000\nhost: 0.0.0.0\nserved-model-name: [a, b]\nmax-num-seqs: 4\nmodel: from-file\n")
    assert cli.main(["serve", "--config", str(file), "--port", "1", "--served-model-name", "c"]) == 0
    assert cli.main(["serve", "from-argument", "--config", str(file)]) == 0
    assert cli.main(["serve"]) == 0
    (first_engine, first), (second_engine, second), (plain_engine, plain) = served_with
    assert (first.port, first.host, first.served_model_name) == (1, "0.0.0.0", ("c",))
    assert (first_engine.max_num_seqs, first_engine.model) == (4, "from-file")
    assert (second.port, second.served_model_name, second_engine.model) == (9000, ("a", "b"), "from-argument")
    assert (plain, plain_engine) == (ServerConfig(), EngineConfig())


def test_a_key_does_not_show_in_the_options_representation() -> None:
    assert "secret" not in repr(ServerConfig(api_key=("secret",)))
