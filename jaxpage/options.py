"""From the fields of config classes to options of the command line, and to keys of a YAML file.

In: a config class whose fields are made by `config.option`. Out: its values, from the command line or, where that says
nothing, from the file.
"""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpage.config import flag
from jaxpage.errors import ConfigError

_KINDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
    dict: "a mapping",
}


def add_fields(group: Any, config: type, skip: Sequence[str] = ()) -> None:
    """An option for every field of a config class. Absent ones keep the field's default."""
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        kind = _kind_of(config, field.name)
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
    kinds = {field.name: _kind_of(config, field.name) for config in configs for field in dataclasses.fields(config)}
    options: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in kinds:
            raise ConfigError(f"--config {file} has the key {key!r}, which is no option: see jaxpage serve --help")
        if name in options:
            raise ConfigError(f"--config {file} has {key!r} twice, with a dash and with an underscore")
        options[name] = _checked(value, kinds[name], f"--config {file}: {key}")
    return options


def _checked(value: Any, kind: type, where: str) -> Any:
    if kind is tuple:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    raise ConfigError(f"{where} is {value!r}: it must be {_KINDS[kind]}")


def _kind_of(config: type, name: str) -> type:
    """What a field's values are: a plain type, `tuple` for a tuple of texts, or `dict` for what has parts."""
    hint = typing.get_type_hints(config)[name]
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    kind: type = typing.get_origin(hint) or hint
    return dict if dataclasses.is_dataclass(kind) else kind


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
