"""Tokenizers from GGUF metadata: byte-level BPE and SentencePiece BPE, built with `tokenizers`."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from draftproof.errors import LoadError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}"

# tokenizer.ggml.pre -> name of the pre-tokenizer.
_PRE = {
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "gpt-2": "gpt2",
    "default": "gpt2",
}


def build_tokenizer(meta: dict[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer that the metadata of a GGUF file describes."""
    kind = meta.get("tokenizer.ggml.model")
    tokens = meta.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise LoadError(f"{where}: there is no tokenizer in its metadata")
    if kind == "gpt2":
        tokenizer = _byte_level(meta, tokens, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(meta, tokens, where)
    else:
        raise LoadError(f"{where}: tokenizer model {kind!r} is not supported, only gpt2 and llama")
    types = _types(meta, tokens)
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    plain = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    _add_ends(tokenizer, meta, tokens)
    return tokenizer


def _types(meta: dict[str, Any], tokens: list[str]) -> list[int]:
    types = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise LoadError(f"tokenizer metadata: {len(tokens)} tokens but {len(types)} token types")
    return list(types)


def _byte_level(meta: dict[str, Any], tokens: list[str], where: str) -> Tokenizer:
    name = meta.get("tokenizer.ggml.pre", "default")
    if name not in _PRE:
        raise LoadError(
            f"{where}: pre-tokenizer {name!r} is not supported; supported: {', '.join(_PRE)}. A "
            "folder with the model's tokenizer.json works with any"
        )
    pre = _PRE[name]
    # The separator is the first space after the first character: a token can be a space itself.
    merges = []
    for merge in meta.get("tokenizer.ggml.merges", ()):
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama3")
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise LoadError(f"{where}: the merges do not fit the vocabulary: {error}") from error
    tokenizer = Tokenizer(bpe)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre == "gpt2":
        tokenizer.pre_tokenizer = words
    else:
        pattern = Regex(_LLAMA3 if pre == "llama3" else _QWEN2)
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: dict[str, Any], tokens: list[str], where: str) -> Tokenizer:
    scores = meta.get("tokenizer.ggml.scores")
    types = _types(meta, tokens)
    if not scores or len(scores) != len(tokens):
        raise LoadError(f"{where}: a SentencePiece vocabulary needs a score for each of its tokens")
    if "<0x00>" not in tokens:
        raise LoadError(f"{where}: a SentencePiece vocabulary without byte tokens is not supported")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(tokens, scores, types)
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    to_blocks = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_blocks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_blocks
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Return merges ordered by score: SentencePiece joins the pair whose merged piece scores best."""
    text = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_NORMAL, _USER_DEFINED)
    }
    found = []
    for token, i in text.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in text and right in text:
                order = (-scores[i], -len(left), -len(right), text[left], text[right])
                found.append((order, left, right))
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


def _add_ends(tokenizer: Tokenizer, meta: dict[str, Any], tokens: list[str]) -> None:
    """Add begin and end tokens around a prompt where the metadata requires them."""
    spm = meta["tokenizer.ggml.model"] == "llama"
    llama3 = not spm and _PRE.get(meta.get("tokenizer.ggml.pre", "default")) == "llama3"
    bos, eos = meta.get("tokenizer.ggml.bos_token_id"), meta.get("tokenizer.ggml.eos_token_id")
    parts, ids = ["$A"], []
    if meta.get("tokenizer.ggml.add_bos_token", spm or llama3) and bos is not None:
        parts.insert(0, tokens[bos])
        ids.append((tokens[bos], bos))
    if meta.get("tokenizer.ggml.add_eos_token", False) and eos is not None:
        parts.append(tokens[eos])
        ids.append((tokens[eos], eos))
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, pair=[*parts, "$B"], special_tokens=list(dict.fromkeys(ids))
        )
