"""Work that is done only where a row of the batch asks for it."""

from collections.abc import Callable
from typing import Any

import jax


def on_demand(needed: jax.Array, work: Callable[[], Any], otherwise: Callable[[], Any], *, branch_free: bool) -> Any:
    """`work()` if `needed`, a bool on the device; else `otherwise()`, which costs less and gives the same shapes.

    `branch_free`: always `work()`, which must then leave rows that ask for nothing as `otherwise()` would, or what it
    gives them must not matter. A branch is decided on the host of a GPU, which waits until the device has come so far,
    and sends off nothing meanwhile.
    """
    return work() if branch_free else jax.lax.cond(needed, work, otherwise)
