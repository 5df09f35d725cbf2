"""Block keys: equal exactly when everything that a block's KV depends on is equal."""

import pytest

from jaxpage.kv_cache.hashing import BlockKey, ExtraKeys, MediaItem, block_keys

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def digests(token_ids: list[int], extra: ExtraKeys | None = None, block_size: int = 4) -> list[bytes]:
    return [key.digest for key in block_keys(token_ids, block_size, extra=extra)]


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_only_full_blocks_have_keys(num_tokens: int, num_keys: int) -> None:
    assert len(block_keys(TOKENS[:num_tokens], 4)) == num_keys


def test_equal_tokens_have_equal_keys_and_a_key_carries_its_own_tokens() -> None:
    first, second = block_keys(TOKENS, 4)
    assert block_keys(tuple(TOKENS), 4) == [first, second]
    assert first.tokens == b"".join(token.to_bytes(4, "little") for token in TOKENS[:4])
    assert second.tokens == b"".join(token.to_bytes(4, "little") for token in TOKENS[4:8])


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("change", [1, 256, 65536, 2**30])
def test_a_changed_token_changes_the_keys_of_its_block_and_of_all_after_it(position: int, change: int) -> None:
    changed = list(TOKENS)
    changed[position] += change
    same = [old == new for old, new in zip(digests(TOKENS), digests(changed), strict=True)]
    assert same == [block < position // 4 for block in range(2)]


def test_swapped_neighbours_change_the_key() -> None:
    assert digests([5, 6, 8, 7]) != digests([5, 6, 7, 8])


def test_the_same_tokens_at_another_place_have_another_key() -> None:
    first, second = block_keys([1, 2, 3, 4, 1, 2, 3, 4], 4)
    assert first.tokens == second.tokens
    assert first.digest != second.digest


@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_keys_can_be_made_piece_by_piece(num_known: int) -> None:
    extra = ExtraKeys(cache_salt="s", lora_name="l", media=(MediaItem("image", 3, 4),))
    whole = block_keys(TOKENS, 4, extra=extra)
    known = whole[:num_known]
    assert known + block_keys(TOKENS, 4, known, extra) == whole


def test_no_extra_keys_are_like_empty_ones() -> None:
    assert digests(TOKENS, ExtraKeys()) == digests(TOKENS)


def test_requests_of_different_salts_share_no_block_and_those_of_one_salt_share_all() -> None:
    plain, one, other = digests(TOKENS), digests(TOKENS, ExtraKeys("a")), digests(TOKENS, ExtraKeys("b"))
    assert len({*plain, *one, *other}) == 6
    assert one == digests(TOKENS, ExtraKeys("a"))


def test_a_salt_is_named_in_the_first_block_alone() -> None:
    salted = ExtraKeys(cache_salt="a")
    assert [salted.for_block(start, start + 4) for start in (0, 4, 8)] == [(("salt", "a"),), (), ()]


def test_a_lora_is_named_in_every_block() -> None:
    adapted = ExtraKeys(lora_name="french")
    assert [adapted.for_block(start, start + 4) for start in (0, 4)] == [(("lora", "french"),)] * 2
    assert not set(digests(TOKENS, adapted)) & set(digests(TOKENS))


def test_a_lora_is_not_taken_for_a_salt_of_its_name() -> None:
    assert digests(TOKENS[:4], ExtraKeys(lora_name="a")) != digests(TOKENS[:4], ExtraKeys(cache_salt="a"))
    assert len({tuple(digests(TOKENS, ExtraKeys(weights=count))) for count in range(3)}) == 3


def test_media_are_named_in_the_blocks_that_they_touch_by_their_offset_from_the_block_start() -> None:
    extra = ExtraKeys(media=(MediaItem("cat", 2, 7), MediaItem("dog", 9, 3)))
    assert [extra.for_block(start, start + 4) for start in (0, 4, 8, 12)] == [
        (("cat", 2),),
        (("cat", -2),),
        (("cat", -6), ("dog", 1)),
        (),
    ]


def test_equal_placeholders_of_different_media_have_different_keys() -> None:
    cat, dog = (digests([1] * 8, ExtraKeys(media=(MediaItem(name, 4, 4),))) for name in ("cat", "dog"))
    assert cat[0] == dog[0]
    assert cat[1] != dog[1]


def test_the_same_medium_at_another_offset_has_another_key() -> None:
    at_0, at_1 = (digests([1] * 4, ExtraKeys(media=(MediaItem("cat", start, 2),))) for start in (0, 1))
    assert at_0 != at_1


def test_a_key_is_told_from_another_by_its_tokens_though_the_digests_are_equal() -> None:
    assert BlockKey(b"same", b"a") != BlockKey(b"same", b"b")
