"""The tokenizer of a GGUF file, made of its metadata."""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specjax.models import chat_template
from specjax.models.errors import ModelError
from specjax.models.fields import is_id, shown
from specjax.models.gguf.header import Header
from specjax.models.gguf.splits import BEGIN, SPLITS, WHOLE
from specjax.models.plain_tokenizer import PlainTokenizer

UNKNOWN, CONTROL, USER, BYTE = 2, 3, 4, 6
"""Kinds of tokens, in `tokenizer.ggml.token_type`."""
_SPACE = "\u2581"
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
)  # fmt: skip
"""Control tokens that end a turn or a text even if no key names them."""
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_LOG = logging.getLogger(__name__)


def tokenizer(header: Header) -> PlainTokenizer | None:
    """The tokenizer of a file, with the methods of transformers'; None if the file has none (ids still work).

    Raises:
      ModelError: if its kind is not supported, or if it is damaged.
    """
    if header.metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return None
    backend = _backend(header)
    template = header.metadata.get("tokenizer.chat_template")
    whole = functools.partial(_transformers, backend, header, template)
    return PlainTokenizer(backend, whole, template if chat_template.is_plain(template) else None)


def ends(header: Header) -> list[int]:
    """The ids that end a text: those named by keys, and tokens that end a turn in known templates."""
    keys = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = _tokens(header)
    ids = [key for key in keys if is_id(key) and key < len(tokens)]
    known = {token: i for i, token in enumerate(tokens) if kinds[i] == CONTROL and token in _ENDS}
    if {"<|return|>", "<|call|>"} <= known.keys():  # in gpt-oss, it ends one part of an answer
        known.pop("<|end|>", None)
    return list(dict.fromkeys([*ids, *(known[token] for token in _ENDS if token in known)]))


def _tokens(header: Header) -> tuple[list[str], list[int]]:
    """Every token and its kind."""
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    kinds = header.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{header.file}: tokenizer.ggml.tokens must be strings")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelError(f"{header.file}: tokenizer.ggml.token_type has no entry for each of {len(tokens)} tokens")
    return tokens, kinds


def _backend(header: Header) -> Tokenizer:
    model = header.metadata["tokenizer.ggml.model"]
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in makers:
        raise ModelError(
            f"{header.file}: the tokenizer is of the kind {shown(model)}; supported are {', '.join(makers)}"
        )
    tokens, kinds = _tokens(header)
    if not tokens:
        raise ModelError(f"{header.file} has no tokenizer.ggml.tokens")
    made, begin = makers[model](header, tokens, kinds)
    exact = {"normalized": False, "single_word": False}
    made.add_special_tokens([AddedToken(t, **exact) for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    made.add_tokens([AddedToken(t, **exact) for t, kind in zip(tokens, kinds, strict=True) if kind == USER])
    _add_ends(made, header, tokens, begin)
    return made


def _add_ends(made: Tokenizer, header: Header, tokens: list[str], begin: bool) -> None:
    """Makes the tokenizer add the BOS token before and the EOS token after a text, if the file says so."""
    metadata, ids = (
        header.metadata,
        {name: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")},
    )
    asked = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", begin),
        "eos": metadata.get("tokenizer.ggml.add_eos_token"),
    }
    used = {name: i for name, i in ids.items() if asked[name] and is_id(i) and i < len(tokens)}
    if not used:
        return
    around = {name: [tokens[i]] for name, i in used.items()}
    single = [*around.get("bos", []), "$A", *around.get("eos", [])]
    named = [(tokens[i], i) for i in dict.fromkeys(used.values())]
    made.post_processor = processors.TemplateProcessing(single=single, pair="$A $B:1", special_tokens=named)


def _byte_level(header: Header, tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    """A tokenizer with byte-pair merges over letters that stand for bytes, as in GPT-2."""
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ModelError(
            f"{header.file}: tokenizer.ggml.pre, how its tokenizer cuts words, is the unknown {shown(name)}; "
            f"known are {', '.join(SPLITS)}"
        )
    if name == "default":
        _LOG.warning(
            "%s does not say how its tokenizer cuts words: its tokens may be others than in training", header.file
        )
    lines = header.metadata.get("tokenizer.ggml.merges", [])
    pairs = [(one[:at], one[at + 1 :]) for one in lines if isinstance(one, str) and (at := one.find(" ", 1)) > 0]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [(left, right) for left, right in pairs if left in vocab and right in vocab and left + right in vocab]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=name in WHOLE))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    made.decoder = decoders.ByteLevel()
    return made, name in BEGIN


def _sentencepiece(header: Header, tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    """A SentencePiece tokenizer: it joins the neighbours whose joined text is the token with the highest score; other
    text becomes bytes."""
    scores = header.metadata.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise ModelError(f"{header.file}: tokenizer.ggml.scores has no entry for each of {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    made = Tokenizer(
        models.BPE(
            vocab,
            merge_pairs(vocab, scores),
            unk_token=tokens[unknown] if is_id(unknown) and unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    spaced = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    first = [normalizers.Prepend(_SPACE)] if spaced else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if spaced else [])])
    return made, True


def merge_pairs(vocab: Mapping[str, int], scores: Mapping[int, float] | Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that forms a token, highest scores first.

    Args:
      vocab: the id of every token, an index of `scores`.
      scores: of the tokens.
    """
    found = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[i], i, vocab[left], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _transformers(backend: Tokenizer, header: Header, template: Any) -> Any:
    """Transformers' tokenizer around `backend`."""
    from transformers import PreTrainedTokenizerFast

    tokens, ids = _tokens(header)[0], {ours: f"tokenizer.ggml.{name}_token_id" for ours, name in _NAMED.items()}
    named = {ours: header.metadata.get(key) for ours, key in ids.items()}
    special = {ours: tokens[i] for ours, i in named.items() if is_id(i) and i < len(tokens)}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    made.chat_template = template
    return made
