"""Tokenizers from folders and GGUF metadata equal their originals; chat templates equal transformers."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from draftproof.errors import LoadError, RequestError
from draftproof.text.chat_template import ChatTemplate
from draftproof.text.token_bytes import byte_decoder, byte_level_alphabet
from draftproof.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it? WE'LL SEE!",
    "def main(x):\n    return x + 1  # comment\n\n\nclass A:\n\tpass\r\n",
    "Größe, naïve café, здравствуй мир, 你好世界, 👍🏽 and ½ of ²",
] * 3
SPECIAL = ["<|bos|>", "<|eos|>"]
CHAT = (
    "{% for m in messages %}{{ '<|bos|>' + m['role'] + '\n' + m['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|bos|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi <b>&</b> 'there'"}, {"role": "assistant", "content": "Yo"}]


def random_text(rng: random.Random, size: int = 40) -> str:
    ascii_codes, digits, spaces = range(32, 127), range(48, 58), (9, 10, 13, 32, 32, 39)
    others = range(0xA0, 0x3000), range(0x4E00, 0xA000), range(0x1F300, 0x1FA00)
    codes = (ascii_codes, ascii_codes, digits, spaces, *others)
    return "".join(chr(rng.choice(rng.choice(codes))) for _ in range(rng.randrange(size)))


@cache
def trained_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return one vocabulary for all kinds, which then differ in pre-tokenization alone.

    Some words have no merges that lead to them: only a model that ignores merges finds those.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"special_tokens": SPECIAL, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, show_progress=False, **options))
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"][:-20]]


@cache
def byte_bpe(kind: str) -> tokenizers.Tokenizer:
    """Build a small byte-level BPE of `kind`, like its model's tokenizer.json."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pre = {"gpt-2": plain, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), plain])}
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    patterns = {"llama-bpe": TikTokenConverter().pattern, "qwen2": PRETOKENIZE_REGEX}
    if kind in patterns:
        split = pre_tokenizers.Split(tokenizers.Regex(patterns[kind]), "isolated")
        pre[kind] = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    vocab, merges = trained_bpe()
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=kind == "llama-bpe"))
    backend.pre_tokenizer = pre[kind]
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken("<tool call>", normalized=False)])
    return backend


def gguf_of(path: Path, backend: tokenizers.Tokenizer, pre: str, **extra: Any) -> Path:
    """Write the metadata that llama.cpp's converter writes for a byte-level BPE."""
    model = json.loads(backend.to_str())["model"]
    size = backend.get_vocab_size(with_added_tokens=True)
    tokens = [backend.id_to_token(i) for i in range(size)]
    added = backend.get_added_tokens_decoder()
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(size)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    fields = {"model": "gpt2", "pre": pre, "bos_token_id": 0, "eos_token_id": 1} | extra
    return write_metadata(path, fields, tokens, types, merges=merges)


def write_metadata(
    path: Path,
    fields: dict[str, Any],
    tokens: list[str],
    types: list[int],
    merges: list[str] | None = None,
    scores: list[float] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in fields.items():
        if value is not None:
            add[type(value)](key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}", value)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# --- byte-level BPE -------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_gguf_byte_level_equals_its_original(tmp_path: Path, pre: str) -> None:
    original = byte_bpe(pre)
    found = load_tokenizer(gguf_of(tmp_path / "t.gguf", original, pre, add_bos_token=False))
    rng = random.Random(1)
    texts = [*CORPUS, "a<|eos|>b<tool call>c", *(random_text(rng) for _ in range(800))]
    for text in texts:
        ids = found.encode(text)
        assert ids == original.encode(text).ids
        for skip in (True, False):
            assert found.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)
    for _ in range(300):  # ids that no text encodes to: invalid bytes
        ids = [rng.randrange(found.vocab_size) for _ in range(12)]
        assert found.decode(ids, False) == original.decode(ids, skip_special_tokens=False)
    for other in {"gpt-2", "smollm", "llama-bpe", "qwen2"} - {pre}:  # the kinds differ
        assert any(found.encode(text) != byte_bpe(other).encode(text).ids for text in texts)


def test_gguf_qwen2_equals_the_tokenizer_of_transformers(tmp_path: Path) -> None:
    original = byte_bpe("qwen2")
    model = json.loads(original.to_str())["model"]
    theirs = transformers.Qwen2Tokenizer(
        vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], unk_token=None
    )
    found = load_tokenizer(gguf_of(tmp_path / "t.gguf", original, "qwen2"))
    rng = random.Random(2)
    for text in [*CORPUS, *(random_text(rng) for _ in range(300))]:
        assert found.encode(text, False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("pre", "extra", "wanted"),
    [
        ("smollm", {}, ([], [])),
        ("llama-bpe", {}, ([0], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
    ],
)
def test_bos_and_eos_follow_the_metadata(
    tmp_path: Path, pre: str, extra: dict[str, Any], wanted: Any
) -> None:
    found = load_tokenizer(gguf_of(tmp_path / "t.gguf", byte_bpe(pre), pre, **extra))
    plain = found.encode("hello", add_special_tokens=False)
    assert found.encode("hello") == [*wanted[0], *plain, *wanted[1]]
    assert (found.bos_token_id, found.eos_token_ids, found.special_ids) == (0, (1,), {0, 1})


def test_token_bytes_and_texts_of_single_tokens(tmp_path: Path) -> None:
    found = load_tokenizer(gguf_of(tmp_path / "t.gguf", byte_bpe("smollm"), "smollm"))
    ids = found.encode("The 👍<|eos|>")
    assert b"".join(found.token_bytes(i) for i in ids) == "The 👍<|eos|>".encode()
    assert "\ufffd" in "".join(found.token_text(i) for i in ids)
    assert found.token_text(1) == "<|eos|>"
    for unknown in (-1, found.vocab_size, 10**6):  # a padded vocabulary can give such ids
        assert found.token_bytes(unknown) == b""
    assert found.decode([unknown, *ids]) == "The 👍"
    with pytest.raises(RequestError, match="Unicode"):
        found.encode("\ud800")


def test_byte_alphabet_equals_that_of_gpt2() -> None:
    assert set(byte_level_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_level_alphabet().values()) == list(range(256))


# --- SentencePiece --------------------------------------------------------------------------------


@cache
def sentencepiece() -> tuple[list[str], list[int], list[float]]:
    """Return a small vocabulary of the Llama 2 kind: control, bytes, pieces by falling score, characters."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    merged = [piece for m in model["merges"] if "你" not in (piece := "".join(m))]
    letters = [token for token in model["vocab"] if len(token) == 1 and token != "你"]
    pieces = [*merged, *letters]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return tokens, types, scores


def spm_path(folder: Path, **extra: Any) -> Path:
    tokens, types, scores = sentencepiece()
    fields = {"model": "llama", "pre": "default", "bos_token_id": 1, "eos_token_id": 2} | extra
    return write_metadata(folder / "spm.gguf", fields, tokens, types, scores=scores)


def spm_reference(text: str) -> list[int]:
    """Encode by the definition of SentencePiece's BPE: join the pair with the best score, repeatedly."""
    tokens, types, scores = sentencepiece()
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == 1}
    parts = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = enumerate(zip(parts, parts[1:], strict=False))
        joins = [(-scores[vocab[a + b]], i) for i, (a, b) in pairs if a + b in vocab]
        if not joins:
            break
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        ids += [vocab[part]] if part in vocab else [3 + byte for byte in part.encode()]
    return ids


def test_sentencepiece_equals_the_definition(tmp_path: Path) -> None:
    found = load_tokenizer(spm_path(tmp_path))
    rng = random.Random(3)
    everything = "".join(CORPUS)
    cuts = []  # inside words, where the order of joins matters
    for _ in range(300):
        starts = [rng.randrange(len(everything)) for _ in range(3)]
        cuts.append("".join(everything[at : at + rng.randrange(1, 8)] for at in starts))
    for text in [*CORPUS, "", " ", "  a", "你", *cuts, *(random_text(rng, 20) for _ in range(100))]:
        text = text.replace("▁", "_")
        ids = found.encode(text)
        assert ids == [1, *spm_reference(text)], text
        assert found.decode(ids) == text
    assert found.encode("a</s>b") == [1, *spm_reference("a"), 2, *spm_reference("b")]


def test_sentencepiece_without_space_prefix_keeps_the_leading_space(tmp_path: Path) -> None:
    found = load_tokenizer(spm_path(tmp_path, add_space_prefix=False, add_bos_token=False))
    assert found.decode(found.encode(" the quick")) == " the quick"
    assert found.encode("the") != found.encode(" the")
    assert load_tokenizer(spm_path(tmp_path, add_bos_token=False)).encode("the") == found.encode(" the")


def test_decode_equals_tokenizers_where_bytes_are_characters(tmp_path: Path) -> None:
    found = load_tokenizer(spm_path(tmp_path))
    rng = random.Random(4)
    for _ in range(300):
        ids = found.encode(random_text(rng)) + found.encode(random_text(rng), False)
        assert found.decode(ids) == found.backend.decode(ids)
    # In an invalid sequence `tokenizers` drops the whole run of bytes; valid characters are kept here.
    ids = [3 + byte for byte in b"\xe4\xbd\xa0\xff"]
    assert found.decode(ids) == "你\ufffd"


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, "'bert' is not supported"),
        ({"model": None}, "no tokenizer"),
        ({"pre": "deepseek-coder"}, "'deepseek-coder' is not supported.*tokenizer.json"),
        ({"model": "llama"}, "score"),
        ({"add_bos_token": True, "bos_token_id": 10**6}, "damaged"),
        ({"tokenizer.chat_template": "{% for %}"}, "cannot be compiled"),
    ],
)
def test_unusable_tokenizer_metadata_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = gguf_of(tmp_path / "t.gguf", byte_bpe("gpt-2"), **({"pre": "gpt-2"} | fields))
    with pytest.raises(LoadError, match=message):
        load_tokenizer(path)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "t.gguf", {"model": "gpt2"}, ["a", "b"], [1, 1], merges=["a c"])
    with pytest.raises(LoadError, match="merges"):
        load_tokenizer(path)
    path.unlink()
    for created, loaded, message in (
        (None, tmp_path, "no tokenizer.json"),
        ("tokenizer.model", tmp_path, "fast tokenizer"),
        (None, tmp_path / "tokenizer.model", "neither"),
        ("tokenizer.json", tmp_path, "tokenizer.json: not a usable"),
    ):
        if created:
            (tmp_path / created).write_text("{}")
        with pytest.raises(LoadError, match=message):
            load_tokenizer(loaded)


def test_decoder_that_depends_on_context_is_refused() -> None:
    with pytest.raises(LoadError, match="WordPiece"):
        byte_decoder(decoders.WordPiece())
    assert byte_decoder(decoders.Metaspace()).to_bytes("▁a") == b" a"


def test_word_level_tokens_are_joined_by_spaces() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    found = Tokenizer(backend, special_tokens={})
    assert found.decode([0, 1, 0]) == backend.decode([0, 1, 0]) == "a b a"


# --- folders and chat -----------------------------------------------------------------------------


def save_folder(folder: Path, template: str | None = CHAT) -> Any:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_bpe("llama-bpe"), bos_token="<|bos|>", eos_token="<|eos|>"
    )
    theirs.chat_template = template
    theirs.save_pretrained(folder)
    return theirs


def test_tokenizer_folder_equals_transformers(tmp_path: Path) -> None:
    theirs = save_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    found = load_tokenizer(tmp_path)
    assert found.eos_token_ids == (7, 1)
    assert found.bos_token_id == theirs.bos_token_id == 0
    rng = random.Random(5)
    for text in [*CORPUS, *(random_text(rng) for _ in range(200))]:
        ids = found.encode(text)
        assert ids == theirs.encode(text)
        assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "template",
    [
        CHAT,
        "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ pad_token }}",
        "{% for m in messages %}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}",
        "{{ strftime_now('%Y') }}{% if tools is none %}no tools{% endif %}{{ flag | default('unset') }}",
    ],
)
def test_chat_template_renders_as_in_transformers(tmp_path: Path, template: str) -> None:
    theirs = save_folder(tmp_path, template)
    found = load_tokenizer(tmp_path)
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {}}}]
    for options in ({}, {"add_generation_prompt": False}, {"tools": tools}, {"flag": "<x>"}):
        if not options.keys() <= {*found.chat_template.names, "add_generation_prompt"}:
            with pytest.raises(RequestError, match="does not use"):  # it would have no effect
                found.apply_chat_template(MESSAGES, **options)
            continue
        merged = {"add_generation_prompt": True, **options}
        wanted = theirs.apply_chat_template(MESSAGES, tokenize=False, **merged)
        assert found.apply_chat_template(MESSAGES, **options) == wanted


@pytest.mark.parametrize("content", ["Yo", "Yo ", " x "])
@pytest.mark.parametrize("filters", ["", " | trim"])
def test_continued_message_renders_as_in_transformers(tmp_path: Path, content: str, filters: str) -> None:
    theirs = save_folder(tmp_path, CHAT.replace("m['content']", f"(m['content']{filters})"))
    found = load_tokenizer(tmp_path)
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    wanted = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert found.apply_chat_template(messages, **options) == wanted
    with pytest.raises(RequestError, match="exclude each other"):
        found.apply_chat_template(messages, continue_final_message=True)
    with pytest.raises(RequestError, match="no final message"):
        found.apply_chat_template([], **options)
    dropped = ChatTemplate("{{ messages[0].content }}", {}, "here")
    with pytest.raises(RequestError, match="drops the final message"):
        dropped.render(messages, **options)


def test_content_parts_are_joined_unless_the_template_accepts_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    plain = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}, "here")
    assert plain.render(messages) == "[one\ntwo]"
    accepts_parts = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(accepts_parts, {}, "here").render(messages) == "(one)(two)"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    with pytest.raises(RequestError, match="only text"):
        plain.render(image)
    assert messages[0]["content"] is parts  # the caller's messages are not changed


def test_chat_template_files_take_precedence_in_order(tmp_path: Path) -> None:
    save_folder(tmp_path, None)
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(tmp_path).apply_chat_template(MESSAGES)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "from config"}]
    config |= {"chat_template": named, "bos_token": {"content": "<|bos|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "from config"
    assert load_tokenizer(tmp_path).bos_token_id == 0
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "from jinja"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused|cannot render"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "refused|cannot render"),
    ],
)
def test_failing_or_unsafe_template_raises_request_error(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(template, {}, "here").render(MESSAGES, add_generation_prompt=True)


# --- the default model ----------------------------------------------------------------------------


def test_smollm2_tokenizer_encodes_and_decodes(smollm2_path: Path) -> None:
    found = load_tokenizer(smollm2_path)
    assert (found.vocab_size, found.eos_token_ids, found.special_ids) == (49152, (2,), set(range(17)))
    texts = [found.token_text(i) for i in found.encode("Hello 12345 world")]
    assert texts == ["Hello", " ", "1", "2", "3", "4", "5", " world"]
    assert found.encode("<|im_start|>a<|im_end|>") == [1, *found.encode("a"), 2]
    prompt = found.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert found.encode(prompt).count(1) == 3
    rng = random.Random(6)
    for _ in range(3000):
        text = random_text(rng)
        ids = found.encode(text)
        assert found.decode(ids) == text
        ids = [rng.randrange(49152) for _ in range(8)]
        assert found.decode(ids) == found.backend.decode(ids)
