"""What a compiled program is: a value that says all of it, so that the compiler and the batch know none by name.

`jit` appears in this file only. What a program takes and changes are *pieces*: the pytrees that stay on the devices, by
their names in `EnginePlan.shapes`. Nothing else crosses between host and device but a program's input (in, a small
int32 array) and its result (out).
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpage.aot.targets import compiler_options
from jaxpage.ops.attention.paged import gpu_of
from jaxpage.ops.gemm_launch import choose_gemms, tuned_gemms

if TYPE_CHECKING:
    from jaxpage.runner.engine_plan import EnginePlan

Piece = Hashable
"""What a pytree on the devices is called: "params", "kv_cache", "state", "hidden", or ("logits", how many)."""

trace_counts: Counter[str] = Counter()
"""How often each program was traced in this process; serving adds none after warm-up."""


class Stage(IntEnum):
    """When a program is compiled."""

    FIRST = 0
    """Serving waits for it."""
    SOON = 1
    """As soon as a first step is served; whoever runs it before waits for it."""
    REST = 2
    """After that. It is used when it is ready, and something else until then."""
    WHEN_RUN = 3
    """In the thread that runs it."""


class Program[Variant: Hashable](ABC):
    """One kind of compiled program. A variant is what it is compiled for besides the engine's shapes."""

    name: str
    variant_type: Any = None
    """Of its variants, as they are read from a message."""
    keeps_unused: bool = False
    """Whether arguments that it does not read are passed all the same."""
    unsettles: bool = False
    """Whether it changes what a `repeats` program has changed."""
    repeats: bool = False
    """Whether its last input does no harm when it comes again, unless another program has unsettled it. It then stands
    for no input, so that a GPU's graph sees the same address again."""

    @abstractmethod
    def variants(self, plan: "EnginePlan") -> Sequence[Variant]:
        """What it is compiled for, the most useful first; none where the engine has no use for it."""

    @abstractmethod
    def stage(self, plan: "EnginePlan", variant: Variant) -> tuple[Stage, int]:
        """When it is compiled, and in which order among the others of that time."""

    @abstractmethod
    def takes(self, plan: "EnginePlan", variant: Variant) -> Sequence[Piece]:
        """The pieces that it takes, in order."""

    @abstractmethod
    def changes(self, plan: "EnginePlan", variant: Variant) -> Sequence[Piece]:
        """Those of them that it takes donated and gives back, in order."""

    @abstractmethod
    def nothing(self, plan: "EnginePlan", variant: Variant) -> np.ndarray | None:
        """Its input where there is nothing for it to do; None for a program without input."""

    @abstractmethod
    def function(self, plan: "EnginePlan", variant: Variant) -> Callable[..., Any]:
        """What is traced: (pieces taken..., input) -> (pieces changed, result)."""

    def result_sharding(self, plan: "EnginePlan", variant: Variant) -> Any:
        """Where its result lies: whole on each device, unless it says otherwise."""
        return replicated(plan)

    def other_shapes(self, plan: "EnginePlan", variant: Variant) -> Any:
        """Shapes that it depends on besides those of its arguments."""
        return ()

    def products(self, plan: "EnginePlan", variant: Variant) -> tuple[int, Any]:
        """Rows of its matrix products, and the shapes of what they multiply; 0 where it has none."""
        return 0, None

    def title(self, variant: Variant) -> str:
        """What a person calls it."""
        return self.name


def arguments(program: Program[Any], plan: "EnginePlan", variant: Any) -> tuple[Any, ...]:
    """What a program takes, as shapes."""
    packed = program.nothing(plan, variant)
    pieces = (plan.shapes[piece] for piece in program.takes(plan, variant))
    return (*pieces, packed) if packed is not None else tuple(pieces)


def compile_program(
    program: Program[Any], plan: "EnginePlan", variant: Any, when_traced: Callable[[], None] = lambda: None
) -> jax.stages.Compiled:
    """Compile a program for the devices of a plan: GPUs among them need not be on this machine.

    `when_traced` is called once no more Python runs for it, and XLA has it. What is compiled gives (pieces changed,
    result). The result is whole on each device.
    """
    function, args = program.function(plan, variant), arguments(program, plan, variant)
    takes, changes = list(program.takes(plan, variant)), program.changes(plan, variant)

    def traced(*args: Any) -> Any:
        trace_counts[program.name] += 1
        return function(*args)

    traced.__name__ = program.name
    # The next program takes what is updated where it lies.
    updated = tuple(_shardings(plan.shapes[piece]) for piece in changes)
    jitted = jax.jit(
        traced,
        donate_argnums=tuple(takes.index(piece) for piece in changes),
        keep_unused=program.keeps_unused,
        out_shardings=(updated, program.result_sharding(plan, variant)),
    )
    lowered = jitted.lower(*args)
    when_traced()
    return lowered.compile(_options_for(plan, *program.products(plan, variant)))


def jit_to_measure(function: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    """A function by itself, compiled for the devices that its arguments lie on, for benches."""
    device = next(iter(jax.tree.leaves(args)[0].sharding.device_set))
    return jax.jit(function).lower(*args).compile(compiler_options(device))


def replicated(plan: "EnginePlan") -> NamedSharding:
    """Whole on each device of a plan."""
    return NamedSharding(plan.mesh, PartitionSpec())


def _options_for(plan: "EnginePlan", num_tokens: int, weights: Any) -> dict[str, Any]:
    """How XLA compiles a program with products of so many rows."""
    device = plan.mesh.devices.flat[0]
    gpu = gpu_of(device)
    if gpu is None or not num_tokens:
        return compiler_options(device)
    matrices = [leaf for leaf in jax.tree.leaves(weights) if len(leaf.shape) > 1]
    # A weight is [..., in]: see `ops.matmul.linear`.
    columns = min(math.prod(leaf.sharding.shard_shape(leaf.shape)[:-1]) for leaf in matrices)
    launches = choose_gemms(num_tokens, columns, matrices[0].dtype.itemsize, gpu, tuned_gemms(gpu))
    return compiler_options(device, launches, num_tokens)


def _shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda shape: shape.sharding, shapes)
