"""From the fields of config classes to options of the command line, and to keys of a YAML file.

In: a config class whose fields are made by `config.option`. Out: its values, from the command line or, where that says
nothing, from the file.
"""

import argparse
import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpage.config import checked_value, flag, kind_of
from jaxpage.errors import ConfigError


def add_fields(group: Any, config: type, skip: Sequence[str] = ()) -> None:
    """An option for every field of a config class. Absent ones keep the field's default."""
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        kind = kind_of(config, field.name)
        default: Any = field.default
        shown = ",".join(default) if kind is tuple else default
        help_text = field.metadata["help"] + ("" if default in (None, ()) else f" ({shown})")
        help_text = (help_text + "; may be repeated" * (kind is tuple)).replace("%", "%%")
        flags = [*field.metadata["short"], flag(field.name)]
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": help_text}
        if kind is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        elif kind is dict:
            group.add_argument(*flags, type=str, metavar="JSON", **options)
        elif kind is tuple:
            group.add_argument(*flags, nargs="+", action=_Collect, type=_texts, metavar="TEXT", **options)
        else:
            group.add_argument(*flags, type=kind, metavar=kind.__name__.upper(), **options)


class _Collect(argparse.Action):
    """Adds up the texts of an option that may be repeated."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        found = [text for texts in values for text in texts]
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *found))


def config_of[T](config: type[T], args: argparse.Namespace, **given: Any) -> T:
    """The config that parsed arguments ask for; `given` goes before them."""
    fields: Any = dataclasses.fields(config)  # type: ignore[arg-type]
    names = {field.name for field in fields}
    return config(**{name: value for name, value in vars(args).items() if name in names} | given)


def read_config_file(file: str, configs: Sequence[type]) -> dict[str, Any]:
    """The options in a YAML file, by field name; keys are options' names, with dashes or underscores.

    Raises `ConfigError` that names file, key and what it must be.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file} cannot be read: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"--config {file} holds no options: write one a line, such as port: 8000")
    kinds = {field.name: kind_of(config, field.name) for config in configs for field in dataclasses.fields(config)}
    options: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            meant = f"; did you mean {near[0].replace('_', '-')}?" if near else ": see jaxpage serve --help"
            raise ConfigError(f"--config {file} has the key {key!r}, which is no option{meant}")
        if name in options:
            raise ConfigError(f"--config {file} has {key!r} twice, with a dash and with an underscore")
        options[name] = checked_value(value, kinds[name], f"--config {file}: {key}")
    return options


def _texts(given: str) -> list[str]:
    """Texts separated by commas, or a JSON list of them, as vLLM takes."""
    if not given.startswith("["):
        return [text.strip() for text in given.split(",")] if given else []
    try:
        texts = json.loads(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{given!r} is no JSON list: {error}") from error
    if not all(isinstance(text, str) for text in texts):
        raise argparse.ArgumentTypeError(f"{given!r} holds something else than texts")
    return list(texts)
