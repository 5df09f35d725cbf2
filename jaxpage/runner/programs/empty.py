"""Pieces that begin empty, made right on their devices, without a copy on the host."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Piece, Program, Stage


class Empty(Program[str]):
    """() -> the pieces of one of `EnginePlan.empty_groups`, in its order, which hold nothing."""

    name = "empty"

    def variants(self, plan: EnginePlan) -> Sequence[str]:
        return list(plan.empty_groups)

    def stage(self, plan: EnginePlan, variant: str) -> tuple[Stage, int]:
        return Stage.WHEN_RUN, 0

    def takes(self, plan: EnginePlan, variant: str) -> Sequence[Piece]:
        return []

    changes = takes

    def nothing(self, plan: EnginePlan, variant: str) -> None:
        return None

    def function(self, plan: EnginePlan, variant: str) -> Callable[..., Any]:
        return lambda: ((), [plan.makers[piece]() for piece in plan.empty_groups[variant]])

    def other_shapes(self, plan: EnginePlan, variant: str) -> Any:
        return [plan.shapes[piece] for piece in plan.empty_groups[variant]]

    def result_sharding(self, plan: EnginePlan, variant: str) -> Any:
        return jax.tree.map(lambda shape: shape.sharding, self.other_shapes(plan, variant))

    def title(self, variant: str) -> str:
        return f"{self.name} {variant}"


EMPTY = Empty()
