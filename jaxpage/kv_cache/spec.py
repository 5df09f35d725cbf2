"""Layer grouping: which layers share a block table, and which arrays hold them all. In: a KVSpec per layer."""

import bisect
from collections.abc import Sequence

from jaxpage.errors import ConfigError
from jaxpage.ops.kv_spec import KVGroup, KVLayout, KVSpec

_MAX_GROUPS = 16
"""Each group is a block table to keep: beyond this, a little padding is the lesser evil."""


def plan_layout(specs: Sequence[KVSpec], block_size: int) -> KVLayout:
    """Group layers of equal kind so that one pool of equal pages serves all and the least of it is unused.

    The groups have the same number of layers; where a kind's layers do not divide by it, its last group has pages in
    arrays that no layer uses. Full attention comes first. Raises `ConfigError` for layers whose sizes have no common
    page.
    """
    kinds: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    ordered = sorted(kinds, key=lambda spec: spec.span is not None)  # stable: full attention first
    size = _layers_per_group([len(layers) for layers in kinds.values()])
    groups: list[KVGroup] = []
    places: dict[int, tuple[int, int]] = {}
    for spec in ordered:
        group = KVGroup(spec, _block_size_of(spec, ordered, block_size))
        for index, layer in enumerate(kinds[spec]):
            places[layer] = (len(groups) + index // size, index % size)
        groups.extend([group] * -(-len(kinds[spec]) // size))
    return KVLayout(tuple(groups), tuple(places[layer] for layer in range(len(specs))))


def _layers_per_group(counts: Sequence[int]) -> int:
    """The group size with the least padding; of equals, the one with the fewest groups."""

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = range(1, max(counts) + 1)
    few = [size for size in sizes if num_groups(size) <= _MAX_GROUPS] or [max(counts)]
    return min(few, key=lambda size: (num_groups(size) * size, -size))


def _block_size_of(spec: KVSpec, specs: Sequence[KVSpec], block_size: int) -> int:
    """Pages are as large as the largest kind's; a kind that keeps less per token has more tokens in each."""
    largest = max(other.token_elements for other in specs)
    ratio, rest = divmod(largest, spec.token_elements)
    if rest or ratio & (ratio - 1):
        raise ConfigError(
            f"layers keep {spec.token_elements} and {largest} numbers per token: their pages can be made equal only "
            "when one is a power of two times the other"
        )
    return block_size * ratio


def num_blocks_for(layout: KVLayout, num_tokens: int, max_step_tokens: int) -> int:
    """Most blocks that a sequence of `num_tokens` ever holds, when a step computes at most `max_step_tokens` of it.

    Full attention keeps all of it; the other kinds what a step's first query sees, and the step itself.
    """
    return sum(_group_blocks(group, num_tokens, max_step_tokens) for group in layout.groups)


def max_request_tokens(layout: KVLayout, num_blocks: int, max_step_tokens: int) -> int:
    """The longest sequence that `num_blocks` can hold, as `num_blocks_for` counts; 2**31 - 1 if any fits."""
    lengths = range(2**31)
    return (
        bisect.bisect_right(lengths, num_blocks, key=lambda length: num_blocks_for(layout, length, max_step_tokens)) - 1
    )


def _group_blocks(group: KVGroup, num_tokens: int, max_step_tokens: int) -> int:
    whole = -(-num_tokens // group.block_size)
    if group.spec.span is None:
        return whole
    # The span may begin inside a block: one more than its size says.
    return min(whole, -(-(group.spec.span - 1 + max_step_tokens) // group.block_size) + 1)
