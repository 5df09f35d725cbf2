"""A vocabulary of single bytes with two special tokens behind them, as llguidance takes one."""

from llguidance import LLTokenizer

EOS, TOOL = 256, 257
VOCAB_SIZE = 258


class ByteVocabulary:
    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", b"<tool>")
    special_token_ids = (EOS, TOOL)
    is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def make_tokenizer() -> LLTokenizer:
    return LLTokenizer(ByteVocabulary())
