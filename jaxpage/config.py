"""The engine's options. Frozen; the command line is made from these fields (see `options`).

In: what a user gives. Out: values checked on their own; whatever depends on the model or the device (context length,
sizes of a step, number of blocks) is resolved once by the engine, which logs each automatic choice with its reason.
"""

import dataclasses
import functools
import os
import types
import typing
from dataclasses import dataclass
from typing import Any

from jaxpage.errors import ConfigError
from jaxpage.models.user_code import is_import_path
from jaxpage.speculative.config import SpeculativeConfig, read_speculative_config


def option(default: Any, help_text: str, *, secret: bool = False, short: tuple[str, ...] = ()) -> Any:
    """A field of a config class, with what `--help` says about it. A secret one is left out of its representation."""
    return dataclasses.field(default=default, metadata={"help": help_text, "short": short}, repr=not secret)


LOOP_NAMES = ("sync", "overlap", "resident")
MAX_STEPS_IN_FLIGHT = 2
"""Steps that a loop has sent off, the newest included, before it knows what the oldest of them gave."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Raises `ConfigError` that names option, value and limit."""

    model: str = option(
        "smollm2-135m",
        "packaged model name, Hugging Face directory, GGUF file, or import path of your own: package.module:function",
    )
    tokenizer: str | None = option(
        None, "packaged model name, directory or GGUF file whose tokenizer is used; default: the model's"
    )
    load_format: str = option(
        "auto", "auto, or dummy: random weights for a directory with no more than a config.json, to measure with"
    )
    dtype: str = option("auto", "weights and activations: auto (float32 on CPU, bfloat16 on GPU), float32, bfloat16")
    chat_template: str | None = option(None, "file with a Jinja chat template, used instead of the model's own")
    max_model_len: int | None = option(
        None, "most tokens of a request, prompt and output; default: the model's context"
    )
    block_size: int = option(16, "token positions per KV cache block; a power of two")
    num_blocks: int | None = option(None, "KV cache blocks in the pool; default: from measured free memory")
    kv_memory_fraction: float | None = option(
        None,
        "share of the memory left beside weights, batch and programs that the KV cache may take; "
        "default: 1 on a GPU, 0.5 on a CPU",
    )
    max_num_seqs: int | None = option(None, "most requests that run at once; default: 256 on a GPU, 64 on a CPU")
    max_num_batched_tokens: int | None = option(None, "token budget of a step; default: 2048 on a GPU, 512 on a CPU")
    long_prefill_token_threshold: int = option(0, "most tokens of one request in a step; 0: no limit but the budget")
    max_num_partial_prefills: int = option(
        0, "most prompts beyond long_prefill_token_threshold computed at once, while shorter ones pass; 0: no limit"
    )
    scheduling_policy: str = option(
        "fcfs", "fcfs, priority (lower values first), or the import path of your own: package.module:Class"
    )
    engine_mode: str = option(
        "resident",
        "sync (the host waits for each step), overlap (meanwhile it prepares the next) or resident (and sends it)",
    )
    tensor_parallel_size: int = option(1, "devices that divide the model among them", short=("-tp", "--tp"))
    num_processes: int = option(
        1, "processes that divide those devices, as on several machines; each is started with its own --process-id"
    )
    process_id: int = option(0, "which of them this is: 0 leads and serves, the others follow it")
    coordinator_address: str | None = option(
        None, "HOST:PORT where process 0 is reached by the others, and a port that is free there"
    )
    speculative_config: SpeculativeConfig | None = option(  # noqa: RUF009
        None,
        'check guesses at the next tokens several at a time: {"method": "ngram", "num_speculative_tokens": 5, '
        '"prompt_lookup_max": 4, "prompt_lookup_min": 2} guesses what followed the same tokens before; default: off',
    )
    enable_prefix_caching: bool = option(True, "keep the KV of computed prefixes and share it")
    seed: int = option(0, "seed of the seeds that unseeded requests get")
    compile_cache_dir: str | None = option(None, "folder of compiled programs; default: the user's cache folder")
    programs: str | None = option(
        None, "folder that `jaxpage compile` has made: its programs are loaded, and none is compiled"
    )
    background_compile: bool = option(
        True, "serve as soon as every step can run in some compiled shape, and compile the rest meanwhile"
    )

    logits_processors: tuple[str, ...] = option(
        (), "import paths of your own functions of the logits, package.module:function, which requests name"
    )
    strict_shapes: bool = option(
        False, "stop the engine when serving compiles something, or moves data to or from the device implicitly"
    )

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "speculative_config", read_speculative_config(self.speculative_config))
        positive = ("block_size", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "num_processes")
        for name in (*positive, "max_model_len", "num_blocks"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}: it must be at least 1")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"{flag('block_size')} is {self.block_size}: it must be a power of two, such as 16 or 32")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(f"{flag('num_blocks')} is {self.num_blocks}: at least 2, as block 0 is the null block")
        if self.kv_memory_fraction is not None and not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError(f"{flag('kv_memory_fraction')} is {self.kv_memory_fraction}: it must be in (0, 1]")
        budget, most_seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and most_seqs is not None and budget < most_seqs:
            raise ConfigError(
                f"{flag('max_num_batched_tokens')} is {self.max_num_batched_tokens}, less than "
                f"{flag('max_num_seqs')} {self.max_num_seqs}: raise it, or lower --max-num-seqs"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"{flag('long_prefill_token_threshold')} is {self.long_prefill_token_threshold}: it must be at least 0"
            )
        if self.max_num_partial_prefills < 0:
            raise ConfigError(
                f"{flag('max_num_partial_prefills')} is {self.max_num_partial_prefills}: it must be at least 0"
            )
        if self.max_num_partial_prefills and not self.long_prefill_token_threshold:
            raise ConfigError(
                f"{flag('max_num_partial_prefills')} is {self.max_num_partial_prefills}, and nothing says which "
                "prompts are long: set --long-prefill-token-threshold, too"
            )
        if self.tensor_parallel_size % self.num_processes:
            raise ConfigError(
                f"{flag('tensor_parallel_size')} is {self.tensor_parallel_size}, which {self.num_processes} processes "
                "do not divide evenly: make it a multiple of --num-processes"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"{flag('process_id')} is {self.process_id}: it must be in [0, {self.num_processes}), the number of "
                "--num-processes"
            )
        if (self.num_processes > 1) != (self.coordinator_address is not None):
            raise ConfigError(
                f"{flag('num_processes')} is {self.num_processes} and {flag('coordinator_address')} is "
                f"{self.coordinator_address}: several processes need one, and a single one has no use for it"
            )
        if self.engine_mode not in LOOP_NAMES:
            raise ConfigError(f"{flag('engine_mode')} is {self.engine_mode!r}: it must be {', '.join(LOOP_NAMES)}")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"{flag('load_format')} is {self.load_format!r}: it must be auto or dummy")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"{flag('dtype')} is {self.dtype!r}: it must be auto, float32 or bfloat16")

    @property
    def tokenizer_source(self) -> str:
        """Where the tokenizer is. Raises `ConfigError` for a model of the user's own that comes with none."""
        if self.tokenizer is None and is_import_path(self.model):
            raise ConfigError(
                f"{flag('model')} is {self.model!r}, your own, which says nothing of a tokenizer: give "
                f"{flag('tokenizer')}"
            )
        return self.tokenizer or self.model

    @property
    def max_drafts(self) -> int:
        """Most drafts of a request that a step checks."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    def sized(self, platform: str) -> "SizedConfig":
        """With the sizes of a step settled as is best on a platform, as JAX names it; what is given holds."""
        default = _STEP_SIZES["cpu" if platform == "cpu" else "gpu"]
        most_seqs = self.max_num_seqs or min(default[0], self.max_num_batched_tokens or default[0])
        budget = self.max_num_batched_tokens or max(default[1], most_seqs)
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return SizedConfig(**options | {"max_num_seqs": most_seqs, "max_num_batched_tokens": budget})


_STEP_SIZES = {"cpu": (64, 512), "gpu": (256, 2048)}
"""max_num_seqs and max_num_batched_tokens: a GPU reads its weights once a step, for however many rows and tokens."""


@dataclass(frozen=True, kw_only=True)
class SizedConfig(EngineConfig):
    """Options of an engine whose platform is known; see `EngineConfig.sized`."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of one request in a step, or between the fewest and the most that it may have behind a step."""
        most = min(self.long_prefill_token_threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)
        return max(most, 1 + MAX_STEPS_IN_FLIGHT * self.max_drafts)


def flag(name: str) -> str:
    """How a field is called on the command line."""
    return "--" + name.replace("_", "-")


_KINDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
    dict: "a mapping",
}


def check_types(config: Any) -> None:
    """Raises `ConfigError` where a field of a config holds what is not of its type; makes tuples of lists."""
    for field in dataclasses.fields(config):
        value: Any = getattr(config, field.name)
        kind = kind_of(type(config), field.name)
        if kind is dict or (value is None and field.default is None):
            continue
        value = os.fspath(value) if kind is str and isinstance(value, os.PathLike) else value
        value = list(value) if isinstance(value, tuple) else value
        try:
            checked = checked_value(value, kind, flag(field.name))
            if kind in (str, tuple):
                object.__setattr__(config, field.name, checked)
        except ConfigError:
            if field.repr:
                raise
            raise ConfigError(f"{flag(field.name)} must be {_KINDS[kind]}") from None  # a secret is not shown


def checked_value(value: Any, kind: type, where: str) -> Any:
    """`value` as a field of a kind has it. Raises `ConfigError`: `where` is set to something else."""
    if kind is tuple:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    raise ConfigError(f"{where} is {value!r}: it must be {_KINDS[kind]}")


@functools.cache
def _hints(config: Any) -> dict[str, Any]:
    return typing.get_type_hints(config)


def kind_of(config: type, name: str) -> type:
    """What a field's values are: a plain type, `tuple` for a tuple of texts, or `dict` for what has parts."""
    hint = _hints(config)[name]
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    kind: type = typing.get_origin(hint) or hint
    return dict if dataclasses.is_dataclass(kind) else kind
