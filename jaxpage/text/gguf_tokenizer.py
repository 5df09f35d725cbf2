"""Builds the tokenizer that a GGUF file describes. In: its metadata. Out: a `tokenizers.Tokenizer`.

GGUF holds the vocabulary but not the pipeline around it: that is named (`tokenizer.ggml.pre`) or follows from flags,
as llama.cpp reads them (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxpage.errors import ModelLoadError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Token types. Control tokens are special; user-defined ones are matched whole in text but are text themselves."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS_THEN_DIGITS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    # The published regular expressions of Llama 3 (up to three digits) and Qwen 2 (single digits).
    "llama3": _CONTRACTIONS + _LETTERS_THEN_DIGITS + "{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + _LETTERS_THEN_DIGITS + _REST,
}
_PRE_TOKENIZERS = {
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "gpt-2": "gpt-2",
    "default": "gpt-2",
}
"""`tokenizer.ggml.pre` to the pipeline that it means."""


def tokenizer_from_gguf(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, BOS and EOS included where the file (or its kind by default) adds them.

    Raises `ModelLoadError` naming what is missing or unknown; `path` is for the message.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError(f"{path} holds no tokenizer: tokenizer.ggml.tokens is missing")
    token_types = metadata.get("tokenizer.ggml.token_type") or (_NORMAL,) * len(tokens)
    try:
        if kind == "gpt2":
            tokenizer, adds_bos = _byte_level(metadata, tokens, path)
        elif kind == "llama":
            # SentencePiece looks for user-defined pieces where spaces are "▁" already; llama.cpp writes theirs as " ".
            tokens = [
                token.replace(" ", "▁") if token_type == _USER_DEFINED else token
                for token, token_type in zip(tokens, token_types, strict=True)
            ]
            tokenizer, adds_bos = _sentencepiece(metadata, tokens, token_types), True
        else:
            raise ModelLoadError(f"{path} has the tokenizer {kind!r}, served are: gpt2, llama")
    except (ValueError, KeyError) as error:
        raise ModelLoadError(f"the tokenizer in {path} is damaged: {error}") from error
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in _of_type(_CONTROL, tokens, token_types)]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in _of_type(_USER_DEFINED, tokens, token_types)])
    _add_frame(tokenizer, metadata, tokens, adds_bos)
    return tokenizer


def _of_type(wanted: int, tokens: Sequence[str], token_types: Sequence[int]) -> list[str]:
    return [token for token, token_type in zip(tokens, token_types, strict=True) if token_type == wanted]


def _byte_level(metadata: dict[str, Any], tokens: Sequence[str], path: Path) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether a BOS is added when the file doesn't say."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{path} has the pre-tokenizer {pre!r} (tokenizer.ggml.pre), served are: {', '.join(_PRE_TOKENIZERS)}"
        )
    pipeline = _PRE_TOKENIZERS[pre]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pipeline == "llama3"))
    if pipeline == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pipeline in _SPLITS:
        split: pre_tokenizers.PreTokenizer = pre_tokenizers.Split(Regex(_SPLITS[pipeline]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pipeline == "smollm" else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pipeline == "llama3"


def _sentencepiece(metadata: dict[str, Any], tokens: Sequence[str], token_types: Sequence[int]) -> Tokenizer:
    """SentencePiece BPE with byte fallback: spaces are written "▁"."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, metadata["tokenizer.ggml.scores"], token_types)
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = None if unknown_id is None else tokens[unknown_id]
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    space_first = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if space_first else "never", split=False)
    strip = [decoders.Strip(content=" ", left=1)] if space_first else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip],
    )
    return tokenizer


def _merges_from_scores(
    vocab: dict[str, int], scores: Sequence[float], token_types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best scored piece first: the order SentencePiece would merge in."""
    pieces = [token for token, token_id in vocab.items() if token_types[token_id] == _NORMAL]
    pieces.sort(key=lambda piece: scores[vocab[piece]], reverse=True)
    known = frozenset(pieces)
    return [
        (left, right)
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)  # where two splits tie, the longer left part first
        if (left := piece[:cut]) in known and (right := piece[cut:]) in known
    ]


def _add_frame(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: Sequence[str], adds_bos: bool) -> None:
    """BOS before and EOS after a text, where wanted; a model without such a token gets none."""
    before, after = "", ""
    special = []
    bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        before = "BOS "
        special.append({"id": "BOS", "ids": [bos], "tokens": [tokens[bos]]})
    if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        after = " EOS"
        special.append({"id": "EOS", "ids": [eos], "tokens": [tokens[eos]]})
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{after}", pair=f"{before}$A{after} $B", special_tokens=special
        )
