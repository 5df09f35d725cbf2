"""How models mark what they say to themselves before they answer, by vLLM's names.

    qwen3          <think>...</think>, where the model or the chat template writes the first tag
    deepseek_r1    the same, and an answer without a first tag begins with reasoning, too
    mistral        [THINK]...[/THINK]

Reasoning stands at the beginning of an answer, or nowhere. One that is cut off before its last tag is all there is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpage.server.parsing.reader import Reader, Reading
from jaxpage.server.parsing.splitter import Parts


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags around reasoning."""

    begin: str
    end: str
    always: bool = False
    """Whether an answer begins with reasoning even where nothing says so."""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end

    def read(self, reader: Reader, parts: Parts, prompt_end: str) -> Reading[None]:
        """Read what stands before the answer itself. `prompt_end`: the prompt's last words."""
        if self.is_over(prompt_end):
            return
        if not self.is_open(prompt_end):
            reader.back((yield from reader.past_blanks()))
            if not (yield from reader.literal(self.begin)) and not self.always:
                reader.back(reader.taken)
                return
        reader.forget()
        if (yield from reader.until(self.end, parts.reasoning)):
            parts.end_reasoning()
            reader.forget()

    def is_open(self, prompt_end: str) -> bool:
        """Whether the prompt has begun the reasoning."""
        return prompt_end.rstrip().endswith(self.begin)

    def is_over(self, prompt_end: str) -> bool:
        """Whether the prompt has ended it, as for a model that is to answer at once."""
        return prompt_end.rstrip().endswith(self.end)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
