"""The HTTP server's options. Frozen; the command line is made from these fields, as from `EngineConfig`'s.

In: what a user gives. Out: values checked on their own, and the API keys, which may stand in a file or the environment.
"""

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpage.config import check_types, flag, option
from jaxpage.errors import ConfigError
from jaxpage.sampling_params import MAX_LOGPROBS

AUTO = "auto"
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic", "json")
REASONING_PARSERS = ("qwen3", "deepseek_r1", "mistral")
API_KEY_VARIABLE = "JAXPAGE_API_KEY"
"""Environment variable with API keys, separated by commas."""
BATCH_OPTIONS = (
    *("served_model_name", "max_request_bytes", "request_timeout"),
    *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"),
)
"""Options that mean something without a socket, too."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server. Raises `ConfigError` that names option, value and limit."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one and prints it")
    uds: str | None = option(None, "path of a Unix socket to listen on, instead of host and port")
    uds_mode: str = option(
        "", "permissions of the Unix socket in octal, such as 660, for a proxy of another user; default: the umask's"
    )
    root_path: str = option("", "prefix under which a proxy serves this server, and which it strips, such as /llm")
    ssl_certfile: str | None = option(None, "PEM file with the certificate chain; with it, the server speaks HTTPS")
    ssl_keyfile: str | None = option(None, "PEM file with the certificate's key, unless that is in ssl_certfile")
    served_model_name: tuple[str, ...] = option(
        (), "model name in the API; several are aliases, and answers carry the first; default: the model as given"
    )
    api_key: tuple[str, ...] = option(
        (),
        f"key that clients must send; others see it in the list of processes: prefer a file, or {API_KEY_VARIABLE}",
        secret=True,
    )
    api_key_file: str | None = option(None, "file with such keys, one a line; lines that begin with # are comments")
    allowed_origins: tuple[str, ...] = option(("*",), "web pages of these origins may use the server; '' for none")
    allowed_methods: tuple[str, ...] = option(("*",), "methods that they may use")
    allowed_headers: tuple[str, ...] = option(("*",), "headers that they may send")
    allow_credentials: bool = option(False, "they may send cookies, too")
    max_request_bytes: int = option(16 * 2**20, "longest body of a request; a longer one gets a 413")
    max_num_waiting: int | None = option(
        None, "most requests that wait for one of the max_num_seqs places, others get a 429; default: no limit"
    )
    max_logprobs: int = option(
        20,
        "most alternatives whose log-probabilities a request may ask for at each token; -1: the whole vocabulary, too",
    )
    request_timeout: float | None = option(
        None, "seconds that a request may take in all, its wait included, before it gets a 504; default: no limit"
    )
    heartbeat_interval: float = option(
        15.0, "seconds of silence after which a stream sends a comment line, so that proxies keep it; 0 sends none"
    )
    max_connections: int | None = option(
        None,
        "most connections at once, others get a 503; default: as many as there are file descriptors for (ulimit -n)",
    )
    keep_alive_timeout: int = option(
        120, "seconds that an idle connection is kept; longer than clients' pools do, so that they close first"
    )
    read_timeout: float = option(60.0, "seconds for a request's head, and between two pieces of its body")
    write_timeout: float = option(60.0, "seconds that a client may read nothing of an answer before it is cut off")
    max_stored_responses: int = option(
        1000, "newest answers of /v1/responses kept in memory for previous_response_id; 0 keeps none"
    )
    log_requests: bool = option(True, "log a line of JSON for each request that has ended, without any text of it")
    shutdown_timeout: float = option(8.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C")
    enable_debug_routes: bool = option(
        False,
        "serve /pause, /resume, /sleep, /wake_up, /reset_prefix_cache, /debug/kv_cache and /debug/profile, which are "
        "not for everyone who may ask for completions",
    )
    web_page: bool = option(
        True,
        "serve a page for people at /, and what it shows of the engine at /live: counts, the state of each KV block, "
        "request ids cut short, and no text",
    )
    vllm_metric_names: bool = option(False, "give /metrics under vLLM's names, too")
    enable_auto_tool_choice: bool = option(
        True, "read tool calls from answers whose request leaves the choice to the model; otherwise they are content"
    )
    tool_call_parser: str = option(
        AUTO,
        f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}; auto: by its chat template, where that is "
        "unmistakable",
    )
    reasoning_parser: str = option(
        AUTO, f"how the model marks its reasoning: {', '.join(REASONING_PARSERS)}, none; auto: by its chat template"
    )

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"{flag('port')} is {self.port}: it must be in [0, 65535]")
        if self.uds is not None and not self.uds:
            raise ConfigError(f"{flag('uds')} is empty: give a path, or leave it out")
        if self.uds_mode and not re.fullmatch("0?[0-7]{3}", self.uds_mode):
            raise ConfigError(f"{flag('uds_mode')} is {self.uds_mode!r}: it must be three octal digits, such as 660")
        if not -1 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"{flag('max_logprobs')} is {self.max_logprobs}: it must be in [-1, {MAX_LOGPROBS}]")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"{flag('root_path')} is {self.root_path!r}: it must start with / and not end with it")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError(f"{flag('ssl_keyfile')} is given without its certificate: set --ssl-certfile, too")
        for name in ("served_model_name", "api_key"):
            if not all(value.strip() for value in getattr(self, name)):
                raise ConfigError(f"{flag(name)} holds an empty text: leave it out")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                f"{flag('allow_credentials')} with {flag('allowed_origins')} '*' lets every page on the web act as its "
                "reader: name the origins"
            )
        least: tuple[tuple[str, float], ...] = (
            ("max_request_bytes", 1),
            ("max_num_waiting", 0),
            ("heartbeat_interval", 0),
            ("max_connections", 1),
            ("keep_alive_timeout", 1),
            ("read_timeout", 0.1),
            ("write_timeout", 0.1),
            ("max_stored_responses", 0),
        )
        for name, limit in least:
            if (value := getattr(self, name)) is not None and not value >= limit:
                raise ConfigError(f"{flag(name)} is {value}: it must be at least {limit}")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"{flag('request_timeout')} is {self.request_timeout}: it must be more than 0 seconds")
        for name, allowed in (
            ("tool_call_parser", (AUTO, *TOOL_CALL_PARSERS)),
            ("reasoning_parser", (AUTO, *REASONING_PARSERS, "none")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)!r}: it must be one of {', '.join(allowed)}")
        if not self.shutdown_timeout >= 0:  # nan is not, either
            raise ConfigError(f"{flag('shutdown_timeout')} is {self.shutdown_timeout}: it must be at least 0 seconds")

    def api_keys(self, environment: Mapping[str, str] = os.environ) -> frozenset[str]:
        """All keys that are accepted; none: everyone may use the server.

        Raises `ConfigError` for a file that cannot be read or holds no key.
        """
        keys = {*self.api_key, *filter(None, map(str.strip, environment.get(API_KEY_VARIABLE, "").split(",")))}
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{flag('api_key_file')} {self.api_key_file} cannot be read: {error}") from error
            found = {key for line in lines if (key := line.strip()) and not key.startswith("#")}
            if not found:
                raise ConfigError(f"{flag('api_key_file')} {self.api_key_file} holds no key: give it one a line")
            keys |= found
        return frozenset(keys)

    def tls_options(self) -> dict[str, Any]:
        """uvicorn's options for HTTPS. Raises `ConfigError` if certificate and key are no pair that can be used."""
        if self.ssl_certfile is None:
            return {}
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{flag('ssl_certfile')} {self.ssl_certfile} and {flag('ssl_keyfile')} {self.ssl_keyfile} cannot be "
                f"used: {error}"
            ) from error
        return {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
