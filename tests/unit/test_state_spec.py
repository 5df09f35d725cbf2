"""What each kind of attention sees, and how layers of several kinds come to share one pool of blocks."""

from collections.abc import Sequence

import pytest

from jaxpage.errors import ConfigError
from jaxpage.kv_cache.spec import block_bytes, max_request_tokens, num_blocks_for, num_useful_blocks, plan_layout
from jaxpage.ops.state_spec import (
    CheckpointLayout,
    KVLayout,
    KVSpec,
    PagedPlace,
    RecurrentPlace,
    RecurrentSpec,
    StateSpec,
)

FULL = KVSpec(2, 64)
WINDOW = KVSpec(2, 64, window=32)
CHUNK = KVSpec(2, 64, chunk=8)


def test_full_attention_sees_everything() -> None:
    assert FULL.span is None
    assert [FULL.first_visible(position) for position in (0, 1, 1000)] == [0, 0, 0]


def test_a_window_counts_the_query_itself() -> None:
    assert WINDOW.span == 32
    assert [WINDOW.first_visible(position) for position in (0, 31, 32, 33, 100)] == [0, 0, 1, 2, 69]


def test_a_chunk_begins_anew_at_each_of_its_multiples() -> None:
    assert CHUNK.span == 8
    assert [CHUNK.first_visible(position) for position in (0, 7, 8, 15, 16, 21)] == [0, 0, 8, 8, 16, 16]


def test_a_token_keeps_a_key_and_a_value() -> None:
    assert KVSpec(3, 10).token_elements == 60


def planned(specs: Sequence[StateSpec]) -> KVLayout:
    """A layout of layers with one state each, in blocks of 16."""
    return plan_layout([[spec] for spec in specs], 16)


def counts(layout: KVLayout) -> list[int]:
    """Layers in each group."""
    return [sum(index == group for group, _ in layout.paged_places) for index in range(len(layout.groups))]


def test_layers_of_one_kind_are_one_group_with_an_array_each() -> None:
    layout = planned([FULL] * 5)
    assert [(group.spec, group.block_size) for group in layout.groups] == [(FULL, 16)]
    assert layout.paged_places == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]
    assert (layout.num_buffers, layout.block_size) == (5, 16)


def test_15_sliding_and_3_full_layers_are_6_groups_of_3_full_attention_first() -> None:
    specs = ([WINDOW] * 5 + [FULL]) * 3
    layout = planned(specs)
    assert [group.spec for group in layout.groups] == [FULL] + [WINDOW] * 5
    assert counts(layout) == [3] * 6
    assert layout.num_buffers == 3
    assert [layout.groups[group].spec for group, _ in layout.paged_places] == specs


def test_29_sliding_and_5_full_layers_are_grouped_with_the_least_padding() -> None:
    layout = planned([WINDOW] * 29 + [FULL] * 5)
    assert [group.spec for group in layout.groups] == [FULL] + [WINDOW] * 6
    assert counts(layout) == [5, 5, 5, 5, 5, 5, 4]
    assert layout.num_buffers == 5


def test_of_groupings_without_padding_the_one_with_the_fewest_groups_is_taken() -> None:
    layout = planned([FULL, WINDOW] * 4)
    assert counts(layout) == [4, 4]


def test_no_two_layers_have_the_same_group_and_array() -> None:
    for num_full in range(1, 8):
        for num_window in range(40):
            layout = planned([FULL] * num_full + [WINDOW] * num_window)
            assert len(set(layout.paged_places)) == num_full + num_window
            assert len(layout.groups) <= 16
            assert max(counts(layout)) == layout.num_buffers


def test_layers_of_one_kind_share_a_group_wherever_they_stand() -> None:
    layout = planned([WINDOW, FULL, CHUNK, FULL, WINDOW, CHUNK])
    assert [layout.groups[group].spec for group, _ in layout.paged_places] == [WINDOW, FULL, CHUNK, FULL, WINDOW, CHUNK]
    assert counts(layout) == [2, 2, 2]


def test_a_kind_that_keeps_less_per_token_has_larger_blocks_so_that_pages_are_equal() -> None:
    wide, narrow, thin = KVSpec(8, 64), KVSpec(2, 64, window=32), KVSpec(8, 32)
    layout = planned([wide, narrow, thin])
    assert {group.spec: group.block_size for group in layout.groups} == {wide: 16, narrow: 64, thin: 32}
    assert len({group.spec.token_elements * group.block_size for group in layout.groups}) == 1
    assert layout.block_size == 16


@pytest.mark.parametrize("odd", [KVSpec(3, 64), KVSpec(8, 48), KVSpec(5, 64)])
def test_pages_that_no_power_of_two_makes_equal_are_refused_with_both_sizes(odd: KVSpec) -> None:
    with pytest.raises(ConfigError, match=f"{odd.token_elements} and 1024 numbers per token"):
        planned([KVSpec(8, 64), odd])


# How many blocks a sequence takes.


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (1000, 63)])
def test_full_attention_keeps_whole_blocks_of_everything(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_for(planned([FULL]), num_tokens, 64) == num_blocks


def test_a_window_keeps_no_more_than_a_step_and_what_its_first_query_sees() -> None:
    layout = planned([WINDOW])
    assert [num_blocks_for(layout, num_tokens, 16) for num_tokens in (16, 48, 64, 100, 10**6)] == [1, 3, 4, 4, 4]


def test_groups_add_up() -> None:
    layout = planned([FULL, WINDOW, WINDOW])
    assert counts(layout) == [1, 1, 1]
    assert num_blocks_for(layout, 160, 16) == 10 + 4 + 4


@pytest.mark.parametrize("specs", [[FULL], [FULL, WINDOW], [FULL, CHUNK, KVSpec(1, 64)]])
def test_the_longest_request_is_the_last_that_fits(specs: list[KVSpec]) -> None:
    layout = planned(specs)
    for num_blocks in range(1, 40):
        longest = max_request_tokens(layout, num_blocks, 16)
        assert num_blocks_for(layout, longest, 16) <= num_blocks < num_blocks_for(layout, longest + 1, 16)


def test_windows_alone_have_room_for_any_length_once_they_have_room_for_themselves() -> None:
    layout = planned([WINDOW])
    assert max_request_tokens(layout, 4, 16) == 2**31 - 1
    assert max_request_tokens(layout, 3, 16) == 48


def test_no_blocks_hold_no_request() -> None:
    assert max_request_tokens(planned([FULL]), 0, 16) == 0


RECURRENT = RecurrentSpec((16, 64), "float32", ("tp", None))
CONVOLUTION = RecurrentSpec((3, 10), "bfloat16", (None, None))


def test_layers_keep_none_one_or_several_states() -> None:
    layout = plan_layout([(), (FULL, RECURRENT), (CONVOLUTION, WINDOW), (FULL,)], 16, axis_sizes={"tp": 1})
    assert layout.layers == (
        (),
        (PagedPlace(0, 0), RecurrentPlace(0)),
        (RecurrentPlace(1), PagedPlace(2, 0)),
        (PagedPlace(1, 0),),
    )
    assert layout.recurrent == (RECURRENT, CONVOLUTION)
    assert layout.num_buffers == 1
    assert [group.spec for group in layout.groups] == [FULL, FULL, WINDOW]


def test_a_layer_may_keep_two_kinds_of_kv() -> None:
    layout = plan_layout([(FULL, WINDOW)] * 2, 16)
    assert layout.layers == ((PagedPlace(0, 0), PagedPlace(1, 0)), (PagedPlace(0, 1), PagedPlace(1, 1)))


@pytest.mark.parametrize(("num_devices", "num_bytes"), [(1, 4096 + 60), (4, 1024 + 60)])
def test_a_checkpoint_takes_the_blocks_that_hold_its_bytes_on_each_device(num_devices: int, num_bytes: int) -> None:
    layout = plan_layout(
        [(KVSpec(4, 8),), (RECURRENT, CONVOLUTION)],
        4,
        kv_itemsize=2,
        num_shards=num_devices,
        axis_sizes={"tp": num_devices},
    )
    of_a_block = 4 * 64 * 2 // num_devices
    assert block_bytes(layout, 2, num_devices) == of_a_block
    assert layout.checkpoint == CheckpointLayout(num_bytes, -(-num_bytes // of_a_block), of_a_block)


def test_without_paged_kv_a_block_is_a_checkpoint() -> None:
    layout = plan_layout([(RECURRENT,), (), (CONVOLUTION,)], 16, axis_sizes={"tp": 2})
    assert (layout.groups, layout.num_buffers, layout.block_size, layout.grain) == ((), 0, 16, 16)
    assert layout.checkpoint == CheckpointLayout(2048 + 60, 1, 2048 + 60)
    assert block_bytes(layout, 2, 2) == 2048 + 60
    assert num_blocks_for(layout, 10**6, 64) == 0
    assert max_request_tokens(layout, 1, 64) == 2**31 - 1
    assert num_useful_blocks(layout, 8, 10**6, 64) > 8


def test_an_axis_that_does_not_divide_a_recurrent_state_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"\(16, 64\) is not divided by 3 devices \(tp\)"):
        plan_layout([(FULL, RECURRENT)], 16, axis_sizes={"tp": 3})


def test_a_recurrent_state_names_an_axis_for_each_dimension() -> None:
    with pytest.raises(ValueError, match="name one for each"):
        RecurrentSpec((16, 64), "float32", ("tp",))
