"""What a request may ask of the sampler, or of beam search. In: keyword options. Out: a checked, immutable struct."""

import json
import sys
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from jaxpage.errors import RequestError

MAX_STOP_TOKEN_IDS = 64
"""Stop token ids that one request may carry, the model's EOS list included (their places on the device)."""
MAX_STOPS = 256
"""Stop strings that one request may have: the text is searched for each of them at every token."""
MAX_N = 128
"""Sequences that one request may ask for."""
MAX_LOGPROBS = 20
"""Alternatives that a request may ask for at each token."""
MAX_LOGIT_BIAS = 512
"""Tokens that one request may bias."""
MAX_BAD_WORDS = 256
"""Forbidden sequences of several tokens that one request may have; `bad_words` give up to two each."""
MAX_BAD_WORD_TOKENS = 16
"""Tokens of the longest of them."""
LOGIT_BIAS_RANGE = 100.0
"""A bias beyond it, on either side, is lowered to it: it already bans a token or forces it."""
MAX_REPETITION_PENALTY = 1000.0
"""Bound of the factor, and of its inverse, on the logit of a repeated token: beyond it, a logit might overflow."""
MAX_BEAM_CANDIDATES = 32
"""Alternatives that a step can report per row: what a beam search needs, its width and one per ending token."""
MAX_BEAM_WIDTH = 16
"""Beams that one search may keep."""
MAX_LENGTH_PENALTY = 10.0
"""Bound of the exponent in a beam's score: beyond it, length alone would decide, and a score might overflow."""


STRUCTURE_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""What a text may have to be, by the fields of `StructuredOutputsParams`."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the generated text must be: one of `STRUCTURE_KINDS` is given. `structured.grammar` says how each is read.

    Raises `RequestError` that names the field, its value and what is allowed.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as an object; kept as text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A grammar in Lark's or in GBNF's notation."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text in which the tags that begin with a trigger follow a schema, as text or as an object; kept as text."""
    preamble: str | None = None
    """Rules in Lark's notation for `preamble`, which is written before all that, such as a model's reasoning."""

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURE_KINDS if getattr(self, name) not in (None, False)]
        names = ", ".join(STRUCTURE_KINDS)
        _check("structured_outputs", given, len(given) == 1, f"exactly one of {names}")
        _check_switch("json_object", self.json_object)
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), Mapping):
                try:
                    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
                except (TypeError, ValueError, RecursionError) as error:
                    raise RequestError(f"{name} is no JSON: {error}", name) from error
                msgspec.structs.force_setattr(self, name, text)
        for name in ("json", "regex", "grammar", "structural_tag", "preamble"):
            value = getattr(self, name)
            _check(name, value, value is None or (isinstance(value, str) and value != ""), "a text that is not empty")
        if self.choice is not None:
            _check_sequence("choice", self.choice)
            _check("choice", self.choice, len(self.choice) > 0, "one text or more")
            for text in self.choice:
                _check("choice", text, isinstance(text, str) and text != "", "texts that are not empty")
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one request; every field is checked when the object is made.

    Raises `RequestError` that names the field, its value and what is allowed.
    """

    temperature: float = 1.0
    """0 is greedy; otherwise up to 2. Values below 0.01 are raised to 0.01."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 is off, more than the vocabulary is off."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the most probable one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in the prompt or the output that are positive, multiplies others; 1 is off."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens in the output as often as they are there; in [-2, 2]."""
    logit_bias: Mapping[int, float] = {}
    """Added to the logits of these token ids; beyond 100 on either side it counts as 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be generated; None: all."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not generated, at the start of a word or within one: the last token of such a text is forbidden
    where the output ends with the tokens before it. Other tokens that spell the same text are not."""
    seed: int | None = None
    """Any int64 but -1: the same tokens whatever shares the batch. None or -1: a fresh seed per request."""
    max_tokens: int | None = 16
    """Most tokens to generate, at least 1; None: to the end of the context."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked, and stop strings not obeyed, before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the output, at most `MAX_STOPS`; the earliest to complete wins and is cut off."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output."""
    include_stop_str_in_output: bool = False
    """Leave the stop string at the end of the text."""
    ignore_eos: bool = False
    """Generate past end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    shown_special_tokens: tuple[str, ...] = ()
    """Special tokens that stay in it all the same, such as the marks of tool calls."""
    n: int = 1
    """Sequences to generate for the prompt, at most `MAX_N`; several need a temperature. Sequence i has seed + i."""
    logprobs: int | None = None
    """Report the log-probability of each generated token and of this many most probable ones, 0 to 20; -1: of the whole
    vocabulary; None: of nothing. They are of the model's own distribution, before any option changes it."""
    prompt_logprobs: int | None = None
    """The same at each token of the prompt but the first, which is then computed whole, whatever is in the cache."""
    logits_processors: tuple[str, ...] = ()
    """Names of the engine's own logits processors (`EngineConfig.logits_processors`) to apply, after all other options
    but a grammar."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt, whatever is in the prefix cache."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must be. It holds before all other options: where they leave none of the tokens that may follow,
    they give way."""

    def __post_init__(self) -> None:
        _check(
            "temperature", self.temperature, _is_number(self.temperature) and 0 <= self.temperature <= 2, "in [0, 2]"
        )
        _check("top_p", self.top_p, _is_number(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        _check("top_k", self.top_k, _is_int(self.top_k) and -1 <= self.top_k < 2**63, "-1 or 0 (off), or at least 1")
        _check("min_p", self.min_p, _is_number(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        _check(
            "seed", self.seed, self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63), "an int64"
        )
        _check(
            "max_tokens",
            self.max_tokens,
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "at least 1, or None for the rest of the context",
        )
        _check("min_tokens", self.min_tokens, _is_int(self.min_tokens) and self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None:
            _check(
                "min_tokens",
                self.min_tokens,
                self.min_tokens <= self.max_tokens,
                f"at most max_tokens={self.max_tokens}",
            )
        _check("n", self.n, _is_int(self.n) and 1 <= self.n <= MAX_N, f"in [1, {MAX_N}]")
        _check("n", self.n, self.n == 1 or not self.greedy, "1 with temperature 0, as all sequences would be equal")
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            _check(
                field,
                value,
                value is None or (_is_int(value) and -1 <= value <= MAX_LOGPROBS),
                f"in [0, {MAX_LOGPROBS}], -1 for the whole vocabulary, or None",
            )
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "skip_reading_prefix_cache"):
            _check_switch(field, getattr(self, field))
        _check_special_tokens(self.shown_special_tokens)
        _check_sequence("stop", self.stop)
        _check("stop", f"{len(self.stop)} strings", len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS}")
        for text in self.stop:
            _check("stop", text, isinstance(text, str) and text != "", "non-empty strings")
        _check_stop_token_ids(self.stop_token_ids)
        _check_sequence("logits_processors", self.logits_processors)
        for name in self.logits_processors:
            _check("logits_processors", name, isinstance(name, str) and name != "", "names of logits processors")
        structured = self.structured_outputs
        is_one = structured is None or isinstance(structured, StructuredOutputsParams)
        _check("structured_outputs", structured, is_one, "StructuredOutputsParams or None")
        self._check_penalties()
        self._check_token_rules()
        # Frozen is for callers: sequences become tuples here, once, so that a list may be given.
        for field in (
            "stop",
            "stop_token_ids",
            "bad_words",
            "allowed_token_ids",
            "logits_processors",
            "shown_special_tokens",
        ):
            if (value := getattr(self, field)) is not None:
                msgspec.structs.force_setattr(self, field, tuple(value))
        limit = LOGIT_BIAS_RANGE
        clamped = {token_id: min(max(float(bias), -limit), limit) for token_id, bias in self.logit_bias.items()}
        msgspec.structs.force_setattr(self, "logit_bias", clamped)

    def _check_penalties(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            _check(field, value, _is_number(value) and -2 <= value <= 2, "in [-2, 2]")
        penalty, limit = self.repetition_penalty, MAX_REPETITION_PENALTY
        allowed = f"above 0, in [{1 / limit:g}, {limit:g}]"
        _check("repetition_penalty", penalty, _is_number(penalty) and 1 / limit <= penalty <= limit, allowed)

    def _check_token_rules(self) -> None:
        field = "logit_bias"
        _check(field, self.logit_bias, isinstance(self.logit_bias, Mapping), "a mapping of token ids to numbers")
        _check(
            field, f"{len(self.logit_bias)} ids", len(self.logit_bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS}"
        )
        for token_id, bias in self.logit_bias.items():
            _check(field, token_id, _is_int(token_id) and token_id >= 0, "a mapping whose keys are token ids >= 0")
            _check(field, bias, _is_number(bias), f"a mapping whose values are numbers (as that of {token_id})")
        if self.allowed_token_ids is not None:
            field = "allowed_token_ids"
            _check_sequence(field, self.allowed_token_ids)
            _check(field, self.allowed_token_ids, len(self.allowed_token_ids) > 0, "one id or more, or None for all")
            for token_id in self.allowed_token_ids:
                _check(field, token_id, _is_int(token_id) and token_id >= 0, "token ids >= 0")
        _check_sequence("bad_words", self.bad_words)
        for word in self.bad_words:
            _check("bad_words", word, isinstance(word, str) and word.strip() != "", "texts that are not blank")

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__struct_fields__ if name != "logit_bias"))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Whether the most probable token depends on what is known already: penalties, a minimum length."""
        penalties = self.repetition_penalty != 1, self.presence_penalty != 0, self.frequency_penalty != 0
        return any(penalties) or self.min_tokens > 0

    @property
    def effective_temperature(self) -> float:
        """The temperature that divides the logits; tiny ones are raised so that they cannot overflow."""
        return 0.0 if self.greedy else max(self.temperature, 0.01)


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one beam search; every field is checked when the object is made.

    Raises `RequestError` that names the field, its value and what is allowed.
    """

    beam_width: int
    """Beams to keep, and most sequences to return; from 1 to `MAX_BEAM_WIDTH`."""
    max_tokens: int = 16
    """Most tokens to generate, at least 1."""
    length_penalty: float = 1.0
    """A score is log-probability / tokens ** this: the larger it is, the more it favours long sequences."""
    early_stopping: bool | Literal["never"] = False
    """When to end once `beam_width` sequences are finished, as in transformers.

    True: at once. False: when no live beam, scored as it is, beats the worst of them. "never": when none can.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a sequence."""
    ignore_eos: bool = False
    """Generate past end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    shown_special_tokens: tuple[str, ...] = ()
    """Special tokens that stay in it all the same, such as the marks of tool calls."""

    def __post_init__(self) -> None:
        _check(
            "beam_width",
            self.beam_width,
            _is_int(self.beam_width) and 1 <= self.beam_width <= MAX_BEAM_WIDTH,
            f"from 1 to {MAX_BEAM_WIDTH}",
        )
        _check("max_tokens", self.max_tokens, _is_int(self.max_tokens) and self.max_tokens >= 1, "at least 1")
        _check(
            "length_penalty",
            self.length_penalty,
            _is_number(self.length_penalty) and abs(self.length_penalty) <= MAX_LENGTH_PENALTY,
            f"in [{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]",
        )
        _check(
            "early_stopping",
            self.early_stopping,
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            "True, False or 'never'",
        )
        for field in ("ignore_eos", "skip_special_tokens"):
            _check_switch(field, getattr(self, field))
        _check_stop_token_ids(self.stop_token_ids)
        _check_special_tokens(self.shown_special_tokens)
        for field in ("stop_token_ids", "shown_special_tokens"):  # a list may be given
            msgspec.structs.force_setattr(self, field, tuple(getattr(self, field)))


Pooling = Literal["last", "mean"]
"""Which hidden states of a prompt make its embedding: that of the last token, or the mean of all."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a prompt becomes an embedding; every field is checked when the object is made.

    Raises `RequestError` that names the field, its value and what is allowed.
    """

    pooling: Pooling = "last"
    dimensions: int | None = None
    """Numbers to keep, the first ones; None for all. Models that are trained for it lose little."""
    normalize: bool = True
    """Make its length 1, after numbers have been left out."""

    def __post_init__(self) -> None:
        _check("pooling", self.pooling, self.pooling in get_args(Pooling), " or ".join(map(repr, get_args(Pooling))))
        if self.dimensions is not None:
            _check("dimensions", self.dimensions, _is_int(self.dimensions) and self.dimensions >= 1, "at least 1")
        _check_switch("normalize", self.normalize)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check(field: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{field} is {value!r}: it must be {allowed}", field)


def _check_switch(field: str, value: object) -> None:
    _check(field, value, isinstance(value, bool), "True or False")


def _check_sequence(field: str, value: object) -> None:
    _check(field, value, isinstance(value, list | tuple), f"a list or a tuple, such as ({value!r},)")


def _check_special_tokens(tokens: tuple[str, ...]) -> None:
    field = "shown_special_tokens"
    _check_sequence(field, tokens)
    for token in tokens:
        _check(field, token, isinstance(token, str) and token != "", "texts that are not empty")


def _check_stop_token_ids(token_ids: tuple[int, ...]) -> None:
    field = "stop_token_ids"
    _check_sequence(field, token_ids)
    for token_id in token_ids:
        _check(field, token_id, _is_int(token_id) and token_id >= 0, "token ids >= 0")
    allowed = f"at most {MAX_STOP_TOKEN_IDS} ids"
    _check(field, f"{len(token_ids)} ids", len(token_ids) <= MAX_STOP_TOKEN_IDS, allowed)


def nth_seed(seed: int, index: int) -> int:
    """The seed of the given sequence of a request: `seed + index`, wrapped to int64 and never -1, which means none."""
    shifted = seed + index
    if seed < -1 <= shifted:
        shifted += 1
    return shifted if shifted < 2**63 else shifted - 2**64
