"""Engine and server options. Frozen; the command line is made from these fields (see `cli`).

In: what a user gives. Out: values checked on their own; whatever depends on the model or the device (context length,
number of blocks) is resolved once by the engine, which logs each automatic choice with its reason.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxpage.errors import ConfigError


def _option(default: Any, help_text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text})


LOOP_NAMES = ("sync", "overlap", "resident")
AUTO = "auto"
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic", "json")
REASONING_PARSERS = ("qwen3", "deepseek_r1", "mistral")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Raises `ConfigError` that names option, value and limit."""

    model: str = _option("smollm2-135m", "packaged model name, Hugging Face directory, or GGUF file")
    dtype: str = _option("auto", "weights and activations: auto (float32 on CPU, bfloat16 on GPU), float32, bfloat16")
    chat_template: str | None = _option(None, "file with a Jinja chat template, used instead of the model's own")
    max_model_len: int | None = _option(
        None, "most tokens of a request, prompt and output; default: the model's context"
    )
    block_size: int = _option(16, "token positions per KV cache block; a power of two")
    num_blocks: int | None = _option(None, "KV cache blocks in the pool; default: from measured free memory")
    kv_memory_fraction: float = _option(0.5, "share of the memory free after loading that the KV cache may take")
    max_num_seqs: int = _option(64, "most requests that run at once")
    max_num_batched_tokens: int = _option(512, "token budget of a step")
    long_prefill_token_threshold: int = _option(0, "most tokens of one request in a step; 0: no limit but the budget")
    max_num_partial_prefills: int = _option(
        0, "most prompts beyond long_prefill_token_threshold computed at once, while shorter ones pass; 0: no limit"
    )
    scheduling_policy: str = _option(
        "fcfs", "fcfs, priority (lower values first), or the import path of your own: package.module:Class"
    )
    engine_mode: str = _option(
        "resident",
        "sync (the host waits for each step), overlap (meanwhile it prepares the next) or resident (and sends it)",
    )
    enable_prefix_caching: bool = _option(True, "keep the KV of computed prefixes and share it")
    seed: int = _option(0, "seed of the seeds that unseeded requests get")
    compile_cache_dir: str | None = _option(None, "folder of compiled programs; default: the user's cache folder")
    background_compile: bool = _option(
        True, "serve as soon as every step can run in some compiled shape, and compile the rest meanwhile"
    )

    logits_processors: tuple[str, ...] = _option(
        (), "import paths of your own functions of the logits, package.module:function, which requests name"
    )
    strict_shapes: bool = _option(
        False, "stop the engine when serving compiles something, or moves data to or from the device implicitly"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))  # a list may be given
        positive = ("block_size", "max_num_seqs", "max_num_batched_tokens")
        for name in positive + tuple(n for n in ("max_model_len", "num_blocks") if getattr(self, n) is not None):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}: it must be at least 1")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"{_flag('block_size')} is {self.block_size}: it must be a power of two, such as 16 or 32"
            )
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(f"{_flag('num_blocks')} is {self.num_blocks}: at least 2, as block 0 is the null block")
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError(f"{_flag('kv_memory_fraction')} is {self.kv_memory_fraction}: it must be in (0, 1]")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"{_flag('max_num_batched_tokens')} is {self.max_num_batched_tokens}, less than "
                f"{_flag('max_num_seqs')} {self.max_num_seqs}: raise it, or lower --max-num-seqs"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"{_flag('long_prefill_token_threshold')} is {self.long_prefill_token_threshold}: it must be at least 0"
            )
        if self.max_num_partial_prefills < 0:
            raise ConfigError(
                f"{_flag('max_num_partial_prefills')} is {self.max_num_partial_prefills}: it must be at least 0"
            )
        if self.max_num_partial_prefills and not self.long_prefill_token_threshold:
            raise ConfigError(
                f"{_flag('max_num_partial_prefills')} is {self.max_num_partial_prefills}, and nothing says which "
                "prompts are long: set --long-prefill-token-threshold, too"
            )
        if self.engine_mode not in LOOP_NAMES:
            raise ConfigError(f"{_flag('engine_mode')} is {self.engine_mode!r}: it must be {', '.join(LOOP_NAMES)}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"{_flag('dtype')} is {self.dtype!r}: it must be auto, float32 or bfloat16")

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of one request in a step."""
        return min(self.long_prefill_token_threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server."""

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on; 0 takes a free one and prints it")
    served_model_name: str | None = _option(None, "model name in the API; default: the model as given")
    shutdown_timeout: float = _option(8.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C")
    enable_debug_routes: bool = _option(
        False,
        "serve /pause, /resume, /sleep, /wake_up, /reset_prefix_cache, /debug/kv_cache and /debug/profile, which are "
        "not for everyone who may ask for completions",
    )
    web_page: bool = _option(
        True,
        "serve a page for people at /, and what it shows of the engine at /live: counts, the state of each KV block, "
        "request ids cut short, and no text",
    )
    vllm_metric_names: bool = _option(False, "give /metrics under vLLM's names, too")
    enable_auto_tool_choice: bool = _option(
        True, "read tool calls from answers whose request leaves the choice to the model; otherwise they are content"
    )
    tool_call_parser: str = _option(
        AUTO,
        f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}; auto: by its chat template, where that is "
        "unmistakable",
    )
    reasoning_parser: str = _option(
        AUTO, f"how the model marks its reasoning: {', '.join(REASONING_PARSERS)}, none; auto: by its chat template"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"{_flag('port')} is {self.port}: it must be in [0, 65535]")
        if not self.shutdown_timeout >= 0:  # nan is not, either
            raise ConfigError(f"{_flag('shutdown_timeout')} is {self.shutdown_timeout}: it must be at least 0 seconds")
        for name, allowed in (
            ("tool_call_parser", (AUTO, *TOOL_CALL_PARSERS)),
            ("reasoning_parser", (AUTO, *REASONING_PARSERS, "none")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)!r}: it must be one of {', '.join(allowed)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
