"""What may follow in a sequence within a grammar, and who waits for it."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait

import numpy as np
import pytest
from byte_tokenizer import EOS, VOCAB_SIZE, make_tokenizer
from llguidance import LLMatcher, LLTokenizer

from jaxpage.sampling_params import StructuredOutputsParams
from jaxpage.structured.constraint import Constraint, Grammars


class BytesForGrammars:
    """What `Grammars` asks of a tokenizer."""

    special_tokens: frozenset[str] = frozenset()

    def for_grammars(self, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
        return make_tokenizer()


class StoppedGrammars(Grammars):
    """Compiles the grammars in `stopped` only when told."""

    def __init__(self) -> None:
        super().__init__(BytesForGrammars, VOCAB_SIZE, [EOS])  # type: ignore[arg-type]
        self.stopped: dict[StructuredOutputsParams, threading.Event] = {}
        self.num_compiled = 0

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        if params in self.stopped:
            self.stopped[params].wait()
        self.num_compiled += 1
        return super()._compile(params)


@pytest.fixture
def grammars() -> Iterator[StoppedGrammars]:
    grammars = StoppedGrammars()
    yield grammars
    for event in grammars.stopped.values():
        event.set()
    grammars.close()


def allowed(constraint: Constraint) -> str:
    """The bytes that may follow, and "$" if the text may end."""
    mask = constraint.mask.result()
    assert (mask.shape, mask.dtype) == ((-(-VOCAB_SIZE // 32),), np.int32)
    token_ids = [token_id for token_id in range(VOCAB_SIZE) if mask[token_id // 32] >> (token_id % 32) & 1]
    return "".join("$" if token_id == EOS else chr(token_id) for token_id in token_ids)


def test_masks_follow_the_text_to_its_end(grammars: StoppedGrammars) -> None:
    constraint = grammars.constrain(StructuredOutputsParams(choice=("ab", "ac", "abd")), ignore_eos=False)
    assert allowed(constraint) == "a"
    assert constraint.accept(ord("a"))
    assert allowed(constraint) == "bc"
    assert constraint.accept(ord("b"))
    assert allowed(constraint) == "d$"
    assert not constraint.accept(ord("d")), "nothing may follow"


def test_a_text_ends_with_the_end_token_where_it_may(grammars: StoppedGrammars) -> None:
    constraint = grammars.constrain(StructuredOutputsParams(regex="a*"), ignore_eos=False)
    assert allowed(constraint) == "a$"
    assert not constraint.accept(EOS)


def test_a_request_that_ignores_the_end_goes_on_while_anything_may_follow(grammars: StoppedGrammars) -> None:
    constraint = grammars.constrain(StructuredOutputsParams(regex="a{0,2}"), ignore_eos=True)
    for _ in range(2):
        assert allowed(constraint) == "a"
        goes_on = constraint.accept(ord("a"))
    assert not goes_on


def test_sequences_of_one_grammar_share_its_compiling_and_nothing_else(grammars: StoppedGrammars) -> None:
    params = StructuredOutputsParams(choice=("ab", "cd"))
    first, second = (grammars.constrain(params, ignore_eos=False) for _ in range(2))
    allowed(first)
    first.accept(ord("a"))
    assert allowed(first) == "b"
    assert allowed(second) == "ac"
    assert grammars.num_compiled == 1


def test_nobody_waits_for_the_grammar_of_another(grammars: StoppedGrammars) -> None:
    slow = StructuredOutputsParams(regex="s")
    grammars.stopped[slow] = threading.Event()
    begun = grammars.constrain(StructuredOutputsParams(regex="ab"), ignore_eos=False)
    allowed(begun)
    waiting = [grammars.constrain(slow, ignore_eos=False) for _ in range(20)]
    assert begun.accept(ord("a"))
    assert allowed(begun) == "b"
    assert not any(constraint.is_ready for constraint in waiting)
    grammars.stopped[slow].set()
    wait([constraint.mask for constraint in waiting])
    assert {allowed(constraint) for constraint in waiting} == {"s"}


def test_a_grammar_that_fails_to_compile_is_ready_and_says_why(grammars: StoppedGrammars) -> None:
    constraint = grammars.constrain(StructuredOutputsParams(grammar="start: <nosuch>"), ignore_eos=False)
    error = constraint.mask.exception()
    assert constraint.is_ready
    assert "nosuch" in str(error)


def test_a_token_that_does_not_fit_is_noticed_at_the_next_mask(grammars: StoppedGrammars) -> None:
    constraint = grammars.constrain(StructuredOutputsParams(regex="ab"), ignore_eos=False)
    allowed(constraint)
    assert constraint.accept(ord("x"))
    assert constraint.mask.exception() is not None
