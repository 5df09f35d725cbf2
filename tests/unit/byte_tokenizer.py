"""A vocabulary of single bytes with two special tokens behind them, as llguidance takes one."""

from llguidance import LLTokenizer

EOS, TOOL = 256, 257
VOCAB_SIZE = 258


class ByteVocabulary:
    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, num_bytes: int) -> None:
        self.eos_token_id = num_bytes
        self.special_token_ids = (num_bytes, num_bytes + 1)
        self.tokens = (*(bytes([byte]) for byte in range(num_bytes)), b"<eos>", b"<tool>")

    def __call__(self, text: str | bytes) -> list[int]:
        known = range(self.eos_token_id)
        return [byte for byte in (text.encode() if isinstance(text, str) else text) if byte in known]


def make_tokenizer(num_bytes: int = 256) -> LLTokenizer:
    """With all bytes, or the first ones only."""
    return LLTokenizer(ByteVocabulary(num_bytes))
