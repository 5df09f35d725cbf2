"""Where states lie: which share a block table, and which arrays hold them. In: the specs of each layer."""

import bisect
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxpage.errors import ConfigError
from jaxpage.ops.state_spec import (
    CheckpointLayout,
    KVGroup,
    KVLayout,
    KVSpec,
    PagedPlace,
    RecurrentPlace,
    RecurrentSpec,
    StatePlace,
    StateSpec,
)

_MAX_GROUPS = 16
"""Each group is a block table to keep: beyond this, a little padding is the lesser evil."""
_CHECKPOINTS_PER_SEQUENCE = 16
"""As many as are of use: of its prompt, of where that parts from others, of its output, and of those before it."""
_ONE_DEVICE: Mapping[str, int] = MappingProxyType({})


def plan_layout(
    states: Sequence[Sequence[StateSpec]],
    block_size: int,
    *,
    kv_itemsize: int = 2,
    num_shards: int = 1,
    axis_sizes: Mapping[str, int] = _ONE_DEVICE,
) -> KVLayout:
    """Give a place to all states of each layer; layers may keep none, one or several.

    Paged ones of equal kind are grouped so that one pool of equal pages serves all and the least of it is unused. The
    groups have the same number of states; where a kind's states do not divide by it, its last group has pages in arrays
    that no layer uses. Full attention comes first. Checkpoints of recurrent states take as many blocks as hold their
    bytes; without paged KV, a block is as large as a checkpoint.

    kv_itemsize: bytes of a number in paged KV; num_shards: devices that divide it; axis_sizes: devices along each mesh
    axis that recurrent states name. Raises `ConfigError` for paged states whose sizes have no common page, and for
    recurrent ones that an axis does not divide.
    """
    flat = [(layer, index, spec) for layer, specs in enumerate(states) for index, spec in enumerate(specs)]
    places: dict[tuple[int, int], StatePlace] = {}
    recurrent: list[RecurrentSpec] = []
    kinds: dict[KVSpec, list[tuple[int, int]]] = {}
    for layer, index, spec in flat:
        if isinstance(spec, RecurrentSpec):
            places[layer, index] = RecurrentPlace(len(recurrent))
            recurrent.append(spec)
        else:
            kinds.setdefault(spec, []).append((layer, index))
    ordered = sorted(kinds, key=lambda spec: spec.span is not None)  # stable: full attention first
    size = _states_per_group([len(of_kind) for of_kind in kinds.values()])
    groups: list[KVGroup] = []
    for spec in ordered:
        group = KVGroup(spec, _block_size_of(spec, ordered, block_size))
        for number, state in enumerate(kinds[spec]):
            places[state] = PagedPlace(len(groups) + number // size, number % size)
        groups.extend([group] * -(-len(kinds[spec]) // size))
    layers = tuple(tuple(places[layer, index] for index in range(len(specs))) for layer, specs in enumerate(states))
    block_size = min((group.block_size for group in groups), default=block_size)
    layout = KVLayout(tuple(groups), layers, block_size, tuple(recurrent))
    if not recurrent:
        return layout
    checkpoint = _checkpoint_layout(layout, kv_itemsize, num_shards, axis_sizes)
    return KVLayout(layout.groups, layers, block_size, layout.recurrent, checkpoint)


def block_bytes(layout: KVLayout, kv_itemsize: int, num_shards: int) -> int:
    """What a block takes of each device, in all arrays together."""
    if not layout.groups:
        return layout.checkpoint.block_bytes if layout.checkpoint is not None else 0
    page = layout.groups[0]
    return layout.num_buffers * page.block_size * page.spec.token_elements * kv_itemsize // num_shards


def _checkpoint_layout(
    layout: KVLayout, kv_itemsize: int, num_shards: int, axis_sizes: Mapping[str, int]
) -> CheckpointLayout:
    try:
        num_bytes = sum(spec.num_bytes(axis_sizes) for spec in layout.recurrent)
    except ValueError as error:
        raise ConfigError(f"{error}: change --tensor-parallel-size") from error
    if not layout.groups:
        return CheckpointLayout(num_bytes, 1, num_bytes)
    of_a_block = block_bytes(layout, kv_itemsize, num_shards)
    return CheckpointLayout(num_bytes, -(-num_bytes // of_a_block), of_a_block)


def _states_per_group(counts: Sequence[int]) -> int:
    """The group size with the least padding; of equals, the one with the fewest groups."""

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = range(1, max(counts, default=1) + 1)
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


def num_useful_blocks(layout: KVLayout, num_seqs: int, num_tokens: int, max_step_tokens: int) -> int:
    """What so many sequences of `num_tokens` could use at most, checkpoints included, and the null block."""
    of_checkpoints = 0 if layout.checkpoint is None else _CHECKPOINTS_PER_SEQUENCE * layout.checkpoint.num_blocks
    return num_seqs * (num_blocks_for(layout, num_tokens, max_step_tokens) + of_checkpoints) + 1


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
