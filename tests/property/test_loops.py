"""Requests arrive, are stepped and aborted in any order: the three loops tell each the same tokens, sooner or later."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated import VOCAB_SIZE, Device, Results, Rule, expected_tokens, layers_of

from jaxpage.engine.loops import LOOPS, Loop
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.kv_cache.spec import max_request_tokens, plan_layout
from jaxpage.ops.state_spec import KVSpec, RecurrentSpec, StateSpec
from jaxpage.requests.request import Request
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.scheduler.step_plan import SchedulerOutput
from jaxpage.wire import TokenOutput

if TYPE_CHECKING:
    from jaxpage.structured.constraint import Constraint

KINDS: tuple[tuple[StateSpec, ...], ...] = (
    (KVSpec(1, 8),),
    (KVSpec(1, 8, window=5), KVSpec(1, 8)),
    (KVSpec(1, 8), RecurrentSpec((80,), "bfloat16", (None,))),
)
BASES = ([0] * 24, [0, 1] * 12)
"""Prompts begin alike, so that they share blocks."""
BLOCK_SIZE, BUDGET, MAX_NUM_SEQS, NUM_BLOCKS = 4, 16, 3, 12
Step = tuple[SchedulerOutput, Results]


class AsyncDevice:
    """Runs each step when it is dispatched, and tells when asked."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def dispatch(self, output: SchedulerOutput) -> Step:
        return output, self._device.run(output)

    def draw_again(self, step: Step, masks: dict[int, np.ndarray | None]) -> Step:
        output, (tokens, *others) = step
        drawn = self._device.draw_again(output, masks)
        return output, ([drawn.get(index, before) for index, before in enumerate(tokens)], *others)

    def has_ended(self, step: Step) -> bool:
        return True

    def fetch(self, step: Step) -> Results:
        return step[1]


@dataclass
class Mode:
    """One loop, and what it has told each request."""

    loop: Loop
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def step(self) -> None:
        for output in self.loop.step():
            assert isinstance(output, TokenOutput)
            assert output.sequence_id not in self.reasons, "a token came after the end"
            self.tokens[output.sequence_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.sequence_id] = output.finish_reason
        self.loop.scheduler.kv_cache.check_integrity()


class Modes(RuleBasedStateMachine):
    """Every rule is applied to all three at once."""

    @initialize(specs=st.sampled_from(KINDS), caching=st.booleans(), max_drafts=st.sampled_from((0, 1, 4)))
    def start(self, specs: tuple[StateSpec, ...], caching: bool, max_drafts: int) -> None:
        self.specs, self.max_drafts = specs, max_drafts
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.aborted: set[str] = set()
        self.modes: dict[str, Mode] = {}
        layout = plan_layout(layers_of(specs), BLOCK_SIZE)
        self.longest = min(max_request_tokens(layout, NUM_BLOCKS, BUDGET), 30)
        for name, loop in LOOPS.items():
            kv_cache = KVCacheManager(NUM_BLOCKS + 1, layout, max_step_tokens=BUDGET, enable_prefix_caching=caching)
            scheduler = Scheduler(kv_cache, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET)
            self.modes[name] = Mode(loop(scheduler, AsyncDevice(Device(MAX_NUM_SEQS, layout, max_drafts))))

    @rule(
        base=st.sampled_from(BASES),
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 6),
        min_tokens=st.integers(0, 6),
        stops=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        seed=st.integers(0, 3),
        greedy=st.booleans(),
        n=st.integers(1, 3),
        drafts=st.booleans(),
        rule=st.none() | st.tuples(st.integers(0, 2), st.integers(1, 6), st.booleans()),
    )
    def add(self, base: list[int], length: int, max_tokens: int, min_tokens: int, seed: int, **options: Any) -> None:
        prompt = base[: min(length, self.longest)]
        max_tokens = min(max_tokens, self.longest + 1 - len(prompt))
        greedy, stops = options["greedy"], options["stops"]
        params = SamplingParams(
            temperature=0 if greedy else 1, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens)
        )
        name = str(len(self.expected))
        for mode in self.modes.values():
            first, *forks = [
                Request(f"{name}.{index}", prompt, params, seed + index, max_tokens, stops, len(self.expected), index)
                for index in range(1 if greedy else options["n"])
            ]
            for fork in forks:
                fork.prefix = first
            first.forks = forks
            mode.loop.scheduler.add(first)
            for request in (first, *forks):
                if options["rule"] is not None:
                    request.constraint = cast("Constraint", Rule(*options["rule"]))
                elif options["drafts"]:
                    request.max_drafts = self.max_drafts
                mode.tokens[request.request_id] = []
                self.expected[request.request_id] = expected_tokens(self.specs, request)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for mode in self.modes.values():
            for _ in range(count):
                mode.step()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.aborted.add(name)
        for mode in self.modes.values():
            mode.loop.scheduler.abort(name)
            mode.reasons.setdefault(name, "abort")

    @invariant()
    def each_has_been_told_the_beginning_of_what_is_to_be_told(self) -> None:
        for mode in getattr(self, "modes", {}).values():
            for name, tokens in mode.tokens.items():
                assert tokens == self.expected[name][0][: len(tokens)]

    def teardown(self) -> None:
        for mode in getattr(self, "modes", {}).values():
            while mode.loop.scheduler.has_requests or mode.loop.has_steps_in_flight:
                mode.step()
            for name, (tokens, reason) in self.expected.items():
                if name not in self.aborted:
                    assert (mode.tokens[name], mode.reasons[name]) == (tokens, reason)
            assert mode.loop.scheduler.kv_cache.pool.usage == 0


TestModes = Modes.TestCase
TestModes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
