"""The options of `jaxpage chat`, and the conversation that they ask for."""

import argparse
import os
from typing import Any

from jaxpage.chat.connection import Connection, served_model
from jaxpage.chat.conversation import Conversation
from jaxpage.chat.terminal import chat
from jaxpage.server_config import API_KEY_VARIABLE

_SAMPLING: tuple[tuple[str, type, str, str], ...] = (
    ("temperature", float, "T", "0 is greedy"),
    ("top_p", float, "P", "nucleus sampling"),
    ("top_k", int, "K", "most probable tokens only"),
    ("min_p", float, "P", "least share of the best"),
    ("max_tokens", int, "N", "most tokens of an answer"),
)
"""Fields of requests: name, type, and what `--help` says. Where one is not given, the server's default holds."""


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """All options but the engine's."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="model to talk with (smollm2-135m)")
    parser.add_argument("--url", metavar="URL", help="ask this server, such as http://127.0.0.1:8000, for MODEL")
    parser.add_argument("--api-key", metavar="KEY", help=f"key that the server wants; default: ${API_KEY_VARIABLE}")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--whole-input", action="store_true", help="all of the input is one message, not each line")
    sampling = parser.add_argument_group("sampling, the server's default where it is not given")
    for name, kind, metavar, what in _SAMPLING:
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=what)
    sampling.add_argument("--sampling-seed", type=int, metavar="S", help="seed of the draws")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")


def api_key_of(args: argparse.Namespace) -> str | None:
    """The key that is sent to a server."""
    return args.api_key or os.environ.get(API_KEY_VARIABLE, "").split(",")[0].strip() or None


def talk(connection: Connection, args: argparse.Namespace) -> int:
    """Chat as the options say; returns the exit code."""
    options: dict[str, Any] = {name: getattr(args, name) for name, *_ in _SAMPLING}
    options |= {"seed": args.sampling_seed, "stop": args.stop}
    given = {name: value for name, value in options.items() if value is not None}
    model = args.model_argument or served_model(connection)
    return chat(Conversation(connection, model, given, system=args.system), whole_input=args.whole_input)
