"""Text to token ids and back, for the API process: chat templates, encoding, decoding as tokens arrive.

In: a model as the user named it. Out: a `Tokenizer`. Imports neither JAX nor transformers, so that the process is up in
a second; ids are the ones that transformers' `AutoTokenizer` gives for the same directory.
"""

import json
import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from jaxpage.errors import ModelLoadError, RequestError
from jaxpage.models.checkpoints.packaged import resolve_model
from jaxpage.text.chat_template import ChatTemplates, check_variables

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A loaded tokenizer. Thread-safe; token ids are plain ints."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str],
        chat_templates: ChatTemplates,
        extra_eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`named_tokens`: "bos_token", "eos_token" and so on to their text, as chat templates see them."""
        self._backend = backend
        self._named_tokens = dict(named_tokens)
        self.chat_templates = chat_templates
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        found = ((byte, backend.token_to_id(f"<0x{byte:02X}>")) for byte in range(256))
        falls_back = "ByteFallback" in str(backend.decoder)
        self._byte_of_id = {i: byte for byte, i in found if i is not None and falls_back}
        self.bos_token_id = self._named_id("bos_token")
        """None for a model that starts its texts with no such token."""
        own_eos = self._named_id("eos_token")
        ends = [*(() if own_eos is None else (own_eos,)), *extra_eos_token_ids]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        """Every token that ends an answer, the tokenizer's own first."""
        self._texts: dict[int, str] = {}
        self._lock = threading.Lock()
        self._for_grammars: LLTokenizer | None = None
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Tokens that have a text; a model's logits may be padded beyond them."""

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Texts of the special tokens."""
        return frozenset(filter(None, map(self._backend.id_to_token, self._special_ids)))

    def for_grammars(self, vocab_size: int, eos_token_ids: Sequence[int]) -> "LLTokenizer":
        """The same vocabulary as llguidance takes it, for logits of so many tokens; seconds for a large one, once.

        eos_token_ids: what ends a text, one id or more.
        """
        from llguidance import LLTokenizer

        with self._lock:
            if self._for_grammars is None:
                size = max(vocab_size, self.vocab_size)
                self._for_grammars = LLTokenizer(self._backend.to_str(), n_vocab=size, eos_token=list(eos_token_ids))
        return self._for_grammars

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, framed by BOS and EOS as the model wants it if `add_special_tokens`.

        Raises `RequestError` for text that is no valid Unicode.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # the library cannot take it as UTF-8
            raise RequestError("the text is not valid Unicode: it has a lone surrogate, half a character") from error
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Each incomplete or wrong UTF-8 sequence becomes one U+FFFD."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        if _REPLACEMENT in text and not self._byte_of_id.keys().isdisjoint(token_ids):
            return self._decode_bytes(self.visible_ids(token_ids, skip_special_tokens))
        return text

    def _decode_bytes(self, token_ids: Sequence[int]) -> str:
        # The library gives up a whole run of byte tokens for one wrong byte. Decoding the run as the bytes it is keeps
        # what was complete, so that text that a stream has sent stays a prefix of the whole.
        pieces: list[str] = []
        run = bytearray()
        for token_id in token_ids:
            if token_id in self._byte_of_id:
                run.append(self._byte_of_id[token_id])
                continue
            if run:
                pieces.append(run.decode("utf-8", "replace"))
                run.clear()
            pieces.append(self._backend.id_to_token(token_id) or "")
        if run:
            pieces.append(run.decode("utf-8", "replace"))
        text: str = self._backend.decoder.decode(pieces)
        return text

    def text_of(self, token_id: int) -> str:
        """Text of a token that stands alone, special ones included; kept, as whole vocabularies may be asked for."""
        if (text := self._texts.get(token_id)) is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def visible_ids(
        self, token_ids: Iterable[int], skip_special_tokens: bool = True, shown: Collection[str] = ()
    ) -> list[int]:
        """The ids that text is made of: known to the vocabulary and, if they are skipped, not special.

        shown: special tokens that are not skipped.
        """
        hidden = self._special_ids if skip_special_tokens else frozenset()
        found = ((token_id, self._backend.id_to_token(token_id)) for token_id in token_ids)
        return [i for i, token in found if token is not None and (i not in hidden or token in shown)]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that the model's chat template makes of `messages` (OpenAI's form; text content only).

        `chat_template_kwargs`: variables for the template. Raises `RequestError` with `param="messages"` when there is
        no template, or when it refuses the messages.
        """
        own = chat_template_kwargs or {}
        check_variables(own)
        variables = {**self._named_tokens, **own, "add_generation_prompt": add_generation_prompt}
        return self.chat_templates.render(messages, tools, variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the chat. The template alone decides about BOS: the tokenizer adds none. Raises as above."""
        prompt = self.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.encode(prompt, add_special_tokens=False)

    def _named_id(self, name: str) -> int | None:
        text = self._named_tokens.get(name)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        return token_id


def load_tokenizer(model: str, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a packaged model, a Hugging Face directory or a GGUF file, named as for `open_checkpoint`.

    chat_template: a file with the template that is used instead of the model's own. Raises `ModelLoadError` naming the
    file that is missing, damaged or of an unknown kind.
    """
    path = resolve_model(model)
    tokenizer = _from_directory(path) if path.is_dir() else _from_gguf(path)
    if chat_template is not None:
        tokenizer.chat_templates = ChatTemplates({"default": _read_template(Path(chat_template))})
    for name, fault in tokenizer.chat_templates.faults().items():
        if chat_template is not None:
            raise ModelLoadError(f"--chat-template {chat_template} does not compile: {fault}")
        logger.warning(
            "the model's chat template %r does not compile, and chats are refused: %s; give one with --chat-template",
            *(name, fault),
        )
    return tokenizer


def _read_template(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"--chat-template {file} cannot be read: {error}: give a file with a template") from error


def _from_gguf(path: Path) -> Tokenizer:
    from jaxpage.models.checkpoints.gguf_config import generation_config_from_gguf
    from jaxpage.models.checkpoints.gguf_metadata import read_gguf_header
    from jaxpage.text.gguf_tokenizer import tokenizer_from_gguf

    metadata = read_gguf_header(path).metadata
    backend = tokenizer_from_gguf(metadata, path)
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            named[f"{name}_token"] = metadata["tokenizer.ggml.tokens"][token_id]
    templates = {"default": metadata["tokenizer.chat_template"]} if "tokenizer.chat_template" in metadata else {}
    prefix = "tokenizer.chat_template."
    templates |= {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    ends = generation_config_from_gguf(metadata).get("eos_token_id", [])
    return Tokenizer(backend, named_tokens=named, chat_templates=ChatTemplates(templates), extra_eos_token_ids=ends)


def _from_directory(path: Path) -> Tokenizer:
    config = _read_json(path / "tokenizer_config.json")
    if (path / "tokenizer.json").is_file():
        backend, named = _backend_from_json(path, config)
    else:
        backend, named = _backend_from_transformers(path)
    generation = _read_json(path / "generation_config.json") or _read_json(path / "config.json")
    ends = generation.get("eos_token_id")
    return Tokenizer(
        backend,
        named_tokens=named,
        chat_templates=ChatTemplates(_directory_templates(path, config)),
        extra_eos_token_ids=[ends] if isinstance(ends, int) else ends or [],
    )


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} holds no JSON object")
    return value


def _backend_from_json(path: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The pipeline in `tokenizer.json`, and named tokens to their text.

    Whether BOS and EOS are added is its post-processor's say alone: like transformers 5, `add_bos_token` and
    `add_eos_token` of `tokenizer_config.json` are ignored beside a `tokenizer.json`.
    """
    file = path / "tokenizer.json"
    try:
        text = file.read_text("utf-8")
        if _is_rebuilt_llama(path, config, text):
            text = _as_llama(text, config)
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    # Tokens may be declared in up to three places; what tokenizer.json lacks is added, in the order of their ids.
    declared = sorted((int(token_id), token) for token_id, token in config.get("added_tokens_decoder", {}).items())
    missing = [AddedToken(**token) for _, token in declared if token["content"] not in known]
    backend.add_tokens(missing)
    known |= {token.content: token for token in missing}
    names = config if declared else {**config, **_read_json(path / "special_tokens_map.json")}
    named = {name: token for name in _NAMED_TOKENS if (token := _as_special(names.get(name), known))}
    extra = names.get("extra_special_tokens") or names.get("additional_special_tokens") or []
    unnamed = [_as_special(entry, known) for entry in (extra.values() if isinstance(extra, dict) else extra)]
    backend.add_special_tokens([*named.values(), *(token for token in unnamed if token)])
    return backend, {name: token.content for name, token in named.items()}


def _as_special(entry: Any, known: Mapping[str, AddedToken]) -> AddedToken | None:
    """A token from a config, where it stands as its text or as an object with flags; None when it is null."""
    if isinstance(entry, str):
        return known.get(entry) or AddedToken(entry, special=True, normalized=False)
    if isinstance(entry, dict) and isinstance(content := entry.get("content"), str):
        flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        return known.get(content) or AddedToken(content, special=True, **flags)
    return None


def _is_rebuilt_llama(path: Path, config: dict[str, Any], tokenizer_json: str) -> bool:
    """Whether transformers takes only vocabulary and post-processor from `tokenizer.json` and builds the rest anew."""
    model_config = _read_json(path / "config.json")
    name = config.get("tokenizer_class") or model_config.get("tokenizer_class") or ""
    is_llama = name.removesuffix("Fast") == "LlamaTokenizer" and model_config.get("model_type", "llama") == "llama"
    return is_llama and '"ByteLevel"' not in tokenizer_json


def _as_llama(tokenizer_json: str, config: dict[str, Any]) -> str:
    """`tokenizer.json` with the pipeline of transformers' `LlamaTokenizer`."""
    data = json.loads(tokenizer_json)
    space_first = config.get("add_prefix_space", True) in (True, None)
    scheme = "never" if not space_first else "always" if config.get("legacy") else "first"
    strip = [decoders.Strip(content=" ", left=1)] if space_first else []
    template = tokenizers.Tokenizer(tokenizers.models.BPE())
    template.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    template.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    pipeline = json.loads(template.to_str())
    data |= {"normalizer": None, "pre_tokenizer": pipeline["pre_tokenizer"], "decoder": pipeline["decoder"]}
    data["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": None, "dropout": None}
    return json.dumps(data)


def _backend_from_transformers(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """For directories without `tokenizer.json`: transformers converts what it finds (a second or more to import)."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"{path} has no tokenizer.json, and transformers finds no tokenizer: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(f"{path} has no tokenizer.json, and {type(loaded).__name__} cannot be converted to one")
    backend.no_truncation()
    backend.no_padding()
    return backend, dict(loaded.special_tokens_map)


def _directory_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template name to source. Files of their own go before what `tokenizer_config.json` says."""
    templates = {file.stem: file.read_text("utf-8") for file in path.glob("additional_chat_templates/*.jinja")}
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text("utf-8")
    if templates:
        return templates
    entry = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return {"default": entry} if entry else {}
