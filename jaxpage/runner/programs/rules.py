"""What an admitted request says of single tokens: biases, bans and bad words."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpage.ops.sampling.token_rules import RulesLayout
from jaxpage.requests.request import Request
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Piece, Program, Stage
from jaxpage.runner.state import BatchState, rules_layout

_NO_ROW = np.iinfo(np.int32).max


def pack_rules(row: int, request: Request, layout: RulesLayout) -> np.ndarray:
    """Pack a request's rules for its row, as [1 + layout.size] int32: the row goes first."""
    params = request.params
    rules = layout.pack(params.allowed_token_ids, params.logit_bias, request.bad_words)
    return np.concatenate([np.array([row], np.int32), rules])


class Rules(Program[None]):
    """(state, rules) -> state."""

    name = "rules"

    def variants(self, plan: EnginePlan) -> Sequence[None]:
        return [None]

    def stage(self, plan: EnginePlan, variant: None) -> tuple[Stage, int]:
        return Stage.SOON, 1

    def takes(self, plan: EnginePlan, variant: None) -> Sequence[Piece]:
        return ["state"]

    changes = takes

    def nothing(self, plan: EnginePlan, variant: None) -> np.ndarray:
        packed = np.zeros(1 + rules_layout(plan.model.vocab_size).size, np.int32)
        packed[0] = _NO_ROW
        return packed

    def function(self, plan: EnginePlan, variant: None) -> Callable[..., Any]:
        def set_rules(state: BatchState, packed: jax.Array) -> tuple[tuple[BatchState], None]:
            return (dataclasses.replace(state, rules=state.rules.at[packed[0]].set(packed[1:])),), None

        return set_rules


RULES = Rules()
