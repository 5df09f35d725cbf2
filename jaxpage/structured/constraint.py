"""Which tokens may follow in a sequence whose text must fit a grammar; computed in threads, beside the engine's loop.

In: a sequence's grammar, and its tokens one by one. Out: a bit for each token of the vocabulary, ahead of each draw.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from jaxpage.sampling_params import StructuredOutputsParams
from jaxpage.structured.grammar import grammar_of

if TYPE_CHECKING:
    from jaxpage.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Mask = np.ndarray
"""[ceil(vocab / 32)] int32: bit i of word j is set if token 32 * j + i may follow."""

_MAX_THREADS = 4
_MAX_KEPT = 64
"""Compiled grammars that are kept for further requests."""


class Constraint:
    """One sequence's way through its grammar. Its tokens come from one thread, each after the mask that allows it."""

    def __init__(self, compute: Callable[[LLMatcher], Mask], pool: ThreadPoolExecutor) -> None:
        self.mask: Future[Mask] = Future()
        """What may follow the tokens so far. Its exception, if any, is why the sequence cannot go on."""
        self._compute = compute
        self._pool = pool
        self._matcher: LLMatcher | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is known how the text may begin, or that it cannot be known."""
        return self.mask.done()

    def begin(self, compiled: "Future[LLMatcher]") -> None:
        """At the beginning of a grammar that is compiled, or was to be."""
        try:
            self._matcher = compiled.result().deep_copy()
            self.mask.set_result(self._compute(self._matcher))
        except Exception as error:
            self.mask.set_exception(error)

    def accept(self, token_id: int) -> bool:
        """Take in a token that the mask allows. Returns whether any may follow: if not, the text is complete."""
        matcher = self._matcher
        assert matcher is not None, "nothing is drawn before there is a mask"
        if matcher.consume_token(token_id) and matcher.is_stopped():
            return False
        self.mask = self._pool.submit(self._compute, matcher)
        return True


class Grammars:
    """Compiles grammars for one tokenizer, and keeps those that were used last."""

    def __init__(
        self, load_tokenizer: Callable[[], "Tokenizer"], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """The tokenizer is loaded when the first grammar comes. vocab_size: of the logits."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        num_threads = min(os.cpu_count() or 1, _MAX_THREADS)
        self._compiling = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._masking = ThreadPoolExecutor(num_threads, thread_name_prefix="mask")
        ends = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in eos_token_ids:
            ends[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._going_on = ~ends.view(np.int32)
        self._is_closed = False
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._num_mask_tokens = vocab_size
        self._compiled: OrderedDict[StructuredOutputsParams, Future[LLMatcher]] = OrderedDict()

    def constrain(self, params: StructuredOutputsParams, *, ignore_eos: bool) -> Constraint:
        """The way of a new sequence, at its beginning. Returns at once; `is_ready` tells when it can begin.

        With `ignore_eos` the text ends only where nothing else may follow.
        """
        compiled = self._compiled.get(params)
        if compiled is None:
            compiled = self._compiled[params] = self._compiling.submit(self._compile, params)
            if len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(params)
        constraint = Constraint(self._mask_without_end if ignore_eos else self._mask, self._masking)

        def begin(done: Future[LLMatcher]) -> None:
            if not self._is_closed:  # nobody waits in a thread for another's grammar
                self._compiling.submit(constraint.begin, done)

        compiled.add_done_callback(begin)
        return constraint

    def close(self) -> None:
        """Compile nothing more; waits for what is being computed."""
        self._is_closed = True
        self._compiling.shutdown(cancel_futures=True)
        self._masking.shutdown(cancel_futures=True)

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        started = time.perf_counter()
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
        tokenizer = self._tokenizer
        for_grammars = tokenizer.for_grammars(self._vocab_size, self._eos_token_ids)
        self._num_mask_tokens = for_grammars.vocab_size
        matcher = LLMatcher(for_grammars, grammar_of(params, tokenizer.special_tokens), log_level=0)
        if matcher.is_error():
            raise RuntimeError(matcher.get_error())
        logger.debug("grammar compiled in %.3f s", time.perf_counter() - started)
        return matcher

    def _mask(self, matcher: LLMatcher) -> Mask:
        """A row of the vocabulary's bits. Raises `RuntimeError` where the grammar cannot go on."""
        mask = allocate_token_bitmask(1, self._num_mask_tokens)
        fill_next_token_bitmask(matcher, mask)
        if matcher.is_error():
            raise RuntimeError(matcher.get_error())
        return mask[0, : -(-self._vocab_size // 32)]

    def _mask_without_end(self, matcher: LLMatcher) -> Mask:
        mask = self._mask(matcher)
        going_on = mask & self._going_on
        return going_on if going_on.any() else mask
