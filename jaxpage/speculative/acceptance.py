"""How many drafts were checked, and how many of them kept. No JAX."""

from dataclasses import dataclass, field

PREFIX = "spec_decode_"


@dataclass(slots=True)
class Acceptance:
    """Counts since the engine started."""

    num_drafts: int = 0
    """Times that drafts of a request were checked."""
    num_draft_tokens: int = 0
    """Drafts checked."""
    num_accepted_tokens: int = 0
    """Of these, those that were kept."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """The same by their place behind the last known token."""

    def count(self, num_checked: int, num_accepted: int) -> None:
        """A request had so many drafts checked, if any, and so many kept."""
        if not num_checked:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_checked
        self.num_accepted_tokens += num_accepted
        counts = self.num_accepted_tokens_per_pos
        counts += [0] * (num_checked - len(counts))
        for position in range(num_accepted):
            counts[position] += 1

    def stats(self) -> dict[str, float]:
        """By the names of the metrics; a position's count has its number behind a colon."""
        name = f"{PREFIX}num_accepted_tokens"
        return {
            f"{PREFIX}num_drafts": self.num_drafts,
            f"{PREFIX}num_draft_tokens": self.num_draft_tokens,
            name: self.num_accepted_tokens,
            **{f"{name}_per_pos:{position}": n for position, n in enumerate(self.num_accepted_tokens_per_pos)},
        }
