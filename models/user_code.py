"""What a user names by import path, `package.module:name`, found in whatever process it is needed in."""

import importlib
from collections.abc import Callable
from typing import Any

from jaxpage.errors import ConfigError


def is_import_path(text: str) -> bool:
    """Whether it is written as `package.module:name`, and no path of a file."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load(path: str, option: str) -> Callable[..., Any]:
    """What is there. Raises `ConfigError` that names the option and the path."""
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option} is {path!r}: it must be package.module:function ({error})") from error
    if not callable(found):
        raise ConfigError(f"{option} is {path!r}, which is no function")
    return found
