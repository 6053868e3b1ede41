"""Tokenizer: text to ids and back, from a model folder or from GGUF metadata."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from draftproof.errors import LoadError, RequestError
from draftproof.models.config import read_json
from draftproof.models.gguf.file import GGUFFile, end_token_ids, is_gguf, read_gguf
from draftproof.text.chat_template import ChatTemplate
from draftproof.text.control_text import ControlTexts, Spans
from draftproof.text.fill_in_middle import encode_inside, find_layout
from draftproof.text.gguf_tokenizer import build_tokenizer
from draftproof.text.token_bytes import byte_decoder

MIN_UNLOCKED_CHARS = 4096  # texts from this length are tokenized without the interpreter lock
_SPECIAL = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


class Tokenizer:
    """Vocabulary with its chat template.

    Text is the concatenation of the tokens' bytes decoded as UTF-8, with U+FFFD for invalid bytes. `decode`
    and the incremental `Detokenizer` therefore agree on every sequence of ids.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        gguf_metadata: Mapping[str, Any] | None = None,
        where: str = "tokenizer",
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)  # "bos_token" -> its text, and so on
        self.where = where
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        eos = list(eos_token_ids)
        if (own := self._id_of("eos_token")) is not None:
            eos.append(own)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._control_texts = ControlTexts([t.content for t in added.values() if t.special])
        self.chat_template = (
            ChatTemplate(chat_template, self.special_tokens, where) if chat_template else None
        )
        decoder = byte_decoder(backend.decoder)
        self.strip_left = decoder.strip_left
        self._to_bytes = decoder.to_bytes
        self.fim = find_layout(backend, gguf_metadata)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    @cached_property
    def longest(self) -> int:
        """Return the characters of the longest token; a vocabulary of 150,000 tokens takes 0.2 s."""
        return max(map(len, self.backend.get_vocab()), default=1)

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; `add_special_tokens` adds BOS and the like as the model expects."""
        return list(self._encoding(text, add_special_tokens).ids)

    def encode_conversation(
        self, messages: Sequence[Mapping[str, Any]], control_tokens_in_messages: bool = False, **template: Any
    ) -> list[int]:
        """Return the prompt of a conversation.

        Texts of special tokens in messages, tools and documents are encoded as text, unless
        `control_tokens_in_messages` is set.
        """
        texts = {name: template[name] for name in ("tools", "documents") if template.get(name)}
        placeholders = None
        if not control_tokens_in_messages:
            (messages, texts), placeholders = self._control_texts.replace((messages, texts))
        text = self.apply_chat_template(messages, **{**template, **texts})
        if placeholders is None:
            return self.encode(text, add_special_tokens=False)
        text, spans = placeholders.restore(text)
        return self._encode_as_text_within(text, spans)

    def _encode_as_text_within(self, text: str, spans: Spans) -> list[int]:
        """Return the ids of `text`; a special token that overlaps one of the spans is encoded as text."""
        encoding, ends = self._encoding(text, False), [end for _, end in spans]
        as_text: dict[str, list[int]] = {}
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            at = bisect_right(ends, start) if token in self.special_ids else len(spans)
            if at == len(spans) or spans[at][0] >= end:
                ids.append(token)
                continue
            piece = text[start:end]
            if piece not in as_text:
                as_text[piece] = self._encode_as_text(piece)
            ids += as_text[piece]
        return ids

    def _encode_as_text(self, text: str) -> list[int]:
        """Return the ids of a special token's text: it is split, so that it is not found."""
        ids: list[int] = []
        newline = self.encode("\n", add_special_tokens=False)  # some tokenizers add a space to a first word
        for part in (text[:1], text[1:]):
            after = self.encode("\n" + part, add_special_tokens=False)
            if after[: len(newline)] == newline:
                after = after[len(newline) :]
            else:
                after = self.encode(part, add_special_tokens=False)
            is_split = len(part) <= 1 or self.special_ids.isdisjoint(after)
            ids += after if is_split else self._encode_as_text(part)
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            if len(text) > MIN_UNLOCKED_CHARS:  # encode_batch releases the lock, encode does not
                return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"the text is not valid Unicode: {error}", "prompt") from error

    def fill_in_middle(
        self, prefix: str | Sequence[int], suffix: str, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the prompt of a text between two parts; RequestError without the tokens for it."""
        if self.fim is None:
            hint = "send the text before the output as the prompt"
            raise RequestError(f"suffix: the tokenizer of this model has no tokens for it; {hint}", "suffix")
        before = self.encode(prefix, add_special_tokens=False) if isinstance(prefix, str) else prefix
        has_space_prefix = self.strip_left > 0
        after = encode_inside(self.backend, suffix) if has_space_prefix else self.encode(suffix, False)
        begins = add_special_tokens and self.encode("")[:1] == [self.bos_token_id]
        return self.encode("")[:begins] + self.fim.token_ids(before, after)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. An id outside the vocabulary adds nothing."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in skip)
        text = data.decode("utf-8", errors="replace")
        return text[min(self.strip_left, len(text) - len(text.lstrip(" "))) :]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text, special tokens included."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id) if token_id >= 0 else None
            known = b"" if token is None else self._to_bytes(token)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """Return the text of a token by itself; part of a character is U+FFFD."""
        known = self._texts.get(token_id)
        if known is None:
            known = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", errors="replace")
        return known

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation, to be encoded with `add_special_tokens=False`."""
        template = self.chat_template
        if chat_template is not None:
            try:
                template = ChatTemplate(chat_template, self.special_tokens, "the request")
            except LoadError as error:
                raise RequestError(str(error), "chat_template") from error
        if template is None:
            raise RequestError(
                f"{self.where}: this model has no chat template; send a plain prompt instead", "messages"
            )
        return template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


def load_tokenizer(source: Path | str, header: GGUFFile | None = None) -> Tokenizer:
    """Load a tokenizer from a folder with tokenizer.json or a .gguf file, whose `header` may be given."""
    source = Path(source)
    if source.is_dir():
        files = sorted(source.glob("*.gguf"))
        if (source / "tokenizer.json").exists() or len(files) != 1:
            return _from_folder(source)
        source = files[0]
    if not is_gguf(source):
        raise LoadError(f"{source}: neither a folder with tokenizer.json nor a GGUF file")
    return _from_gguf(header or read_gguf(source))


def _from_gguf(header: GGUFFile) -> Tokenizer:
    path, meta = header.path, header.metadata
    try:
        backend = build_tokenizer(meta, str(path))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise LoadError(f"{path}: its tokenizer metadata is damaged: {error!r}") from error
    tokens = meta["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
    special = {}
    for name, key in names.items():
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_token_ids=end_token_ids(meta),
        chat_template=meta.get("tokenizer.chat_template"),
        gguf_metadata=meta,
        where=str(path),
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        hint = ""
        if (folder / "tokenizer.model").exists():
            hint = " (tokenizer.model alone is not enough; save the fast tokenizer beside it)"
        raise LoadError(f"{folder}: no tokenizer.json in it{hint}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise LoadError(f"{path}: not a usable tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.exists() else {}
    special = {}
    for name in (f"{kind}_token" for kind in _SPECIAL):
        text = config.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str):
            special[name] = text
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_token_ids=_folder_eos(folder),
        chat_template=_folder_template(folder, config),
        where=str(folder),
    )


def _folder_eos(folder: Path) -> list[int]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_json(path).get("eos_token_id") if path.exists() else None
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return ids


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template of chat_template.jinja, chat_template.json or tokenizer_config.json."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return jinja.read_text(encoding="utf-8")
    separate = folder / "chat_template.json"
    template = (read_json(separate) if separate.exists() else config).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
