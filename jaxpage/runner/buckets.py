"""The one table of padded step shapes. Every compiled step program belongs to one bucket."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """The padded shape of a step. Sorts by cost."""

    num_tokens: int
    num_rows: int
    max_query_len: int
    """1 in a pure decode, where tokens and rows are one and the same."""

    @property
    def takes_any_query(self) -> bool:
        """Whether the query of one row may be as long as the step."""
        return self.max_query_len == self.num_tokens

    def fits(self, num_tokens: int, num_rows: int, max_query_len: int) -> bool:
        """Whether a step of this size can run in the bucket."""
        return num_tokens <= self.num_tokens and num_rows <= self.num_rows and max_query_len <= self.max_query_len


_FEW_ROWS = 8
_FEW_TOKENS = 32


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int, max_drafts: int = 0) -> list[Bucket]:
    """The table, smallest first; few enough to compile in seconds each.

    Decode: 4, 8, 16, 32, ... rows (fewer cost what 4 do). With prompts: the token budget, a quarter of it, a sixteenth,
    down to `_FEW_TOKENS`; the smallest has few rows, as a lone request's first token should not wait for the logits of
    a full batch. With drafts, each decode has a fellow whose rows have as many more tokens.
    """
    buckets = set()
    rows = 4
    while rows < max_num_seqs:
        buckets.add(Bucket(rows, rows, 1))
        rows *= 2
    buckets.add(Bucket(max_num_seqs, max_num_seqs, 1))
    if max_drafts:
        checks = [min(bucket.num_rows * (1 + max_drafts), max_num_batched_tokens) for bucket in buckets]
        buckets |= {
            Bucket(n, bucket.num_rows, min(1 + max_drafts, n)) for n, bucket in zip(checks, buckets, strict=True)
        }
    buckets.add(Bucket(max_num_batched_tokens, max_num_seqs, max_num_batched_tokens))
    num_tokens = max_num_batched_tokens // 4
    while num_tokens >= _FEW_TOKENS:
        few = num_tokens // 4 < _FEW_TOKENS
        buckets.add(Bucket(num_tokens, min(max_num_seqs, _FEW_ROWS if few else num_tokens), num_tokens))
        num_tokens //= 4
    return sorted(buckets)


def by_usefulness(buckets: Collection[Bucket]) -> list[Bucket]:
    """The order to compile in.

    First what serves everything, if a step carries no more tokens than it: the smallest that takes prompts and all
    rows. Then the largest decode, which all decoding can run in; what serves a lone request; and the rest.
    """
    mixed = sorted(bucket for bucket in buckets if bucket.max_query_len > 1 and bucket.takes_any_query)
    decode = sorted(bucket for bucket in buckets if bucket.max_query_len == 1)
    num_rows = max(bucket.num_rows for bucket in buckets)
    first = [bucket for bucket in mixed or decode if bucket.num_rows == num_rows][:1]
    return list(dict.fromkeys([*first, *decode[-1:], *decode[:1], *mixed[:1], *mixed[-1:], *sorted(buckets)]))


def choose_bucket(buckets: Collection[Bucket], num_tokens: int, num_rows: int, max_query_len: int) -> Bucket:
    """The cheapest of `buckets` that a step fits in."""
    fitting = [bucket for bucket in buckets if bucket.fits(num_tokens, num_rows, max_query_len)]
    assert fitting, f"no bucket for {num_tokens} tokens, {num_rows} rows, queries of {max_query_len}"
    return min(fitting)
