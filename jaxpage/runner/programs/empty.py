"""Pieces that begin empty, made right on their devices, without a copy on the host."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Piece, Program, Stage


class Empty(Program[Piece]):
    """() -> a piece that holds nothing."""

    name = "empty"

    def variants(self, plan: EnginePlan) -> Sequence[Piece]:
        return list(plan.makers)

    def stage(self, plan: EnginePlan, variant: Piece) -> tuple[Stage, int]:
        return Stage.WHEN_RUN, 0

    def takes(self, plan: EnginePlan, variant: Piece) -> Sequence[Piece]:
        return []

    changes = takes

    def nothing(self, plan: EnginePlan, variant: Piece) -> None:
        return None

    def function(self, plan: EnginePlan, variant: Piece) -> Callable[..., Any]:
        return lambda: ((), plan.makers[variant]())

    def other_shapes(self, plan: EnginePlan, variant: Piece) -> Any:
        return plan.shapes[variant]

    def result_sharding(self, plan: EnginePlan, variant: Piece) -> Any:
        return jax.tree.map(lambda shape: shape.sharding, plan.shapes[variant])

    def title(self, variant: Piece) -> str:
        return f"{self.name} {variant}"


EMPTY = Empty()
