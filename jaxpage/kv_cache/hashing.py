"""Names for full blocks: a digest of everything that their KV depends on. No JAX."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A full block's name. Two blocks with the same digest hold the same KV, unless the hash collides."""

    digest: bytes
    """Of the parent's digest, the tokens and the extra keys: of the whole prefix up to the block's end."""
    tokens: bytes
    """The block's tokens as int32: the check against collisions."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or the like in a prompt: its placeholder tokens are alike for all, so its hash must tell them apart."""

    digest: str
    start: int
    """First position of its placeholders."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What a request's KV depends on besides its tokens."""

    cache_salt: str | None = None
    """Shares blocks only with requests of the same salt; part of the first block's key, and so of all."""
    lora_name: str | None = None
    media: tuple[MediaItem, ...] = ()
    weights: int = 0
    """How often the weights had been replaced when it began: KV of other weights is not its own. As the salt, part of
    the first block's key."""

    def for_block(self, start: int, end: int) -> tuple[object, ...]:
        """Extra keys of the block of positions `start` to `end`: names, and media with offsets relative to `start`.

        An item that began before the block has a negative offset.
        """
        keys: list[object] = [] if self.lora_name is None else [("lora", self.lora_name)]
        for item in self.media:
            if item.start < end and item.start + item.num_tokens > start:
                keys.append((item.digest, item.start - start))
        if start == 0 and self.cache_salt is not None:
            keys.append(("salt", self.cache_salt))
        if start == 0 and self.weights:
            keys.append(("weights", self.weights))
        return tuple(keys)


def block_keys(
    token_ids: Sequence[int], block_size: int, known: Sequence[BlockKey] = (), extra: ExtraKeys | None = None
) -> list[BlockKey]:
    """Keys of the full blocks of `token_ids` that follow the `known` ones, each chained to the one before."""
    parent = known[-1].digest if known else bytes(_DIGEST_BYTES)
    keys = []
    for start in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        tokens = array("i", token_ids[start:end]).tobytes()
        extra_keys = extra.for_block(start, end) if extra is not None else ()
        name = parent + tokens + (repr(extra_keys).encode() if extra_keys else b"")
        parent = hashlib.blake2b(name, digest_size=_DIGEST_BYTES).digest()
        keys.append(BlockKey(parent, tokens))
    return keys
