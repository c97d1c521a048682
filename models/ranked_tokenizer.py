"""Tokenizers of folders that have no `tokenizer.json` and no `tokenizer.model`, but one of these:

- `tekken.json`, Mistral's format: bytes by rank, the pattern that cuts words, and special tokens, which come first;
- `*.tiktoken`, the format of the package tiktoken: bytes by rank. The file's name or the model says which pattern cuts words;
- `vocab.json` and `merges.txt`, GPT-2's format, which a class of transformers reads.

The first two become a `tokenizer.json`, which transformers reads together with the other files of the folder.
"""

import base64
import dataclasses
import json
import logging
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specjax.models.errors import ModelError
from specjax.models.fields import is_id, shown
from specjax.models.gguf.splits import SPLITS
from specjax.models.gguf.vocabulary import merge_pairs
from specjax.models.json_file import read_json

_LOG = logging.getLogger(__name__)
TEKKEN, VOCAB, MERGES = "tekken.json", "vocab.json", "merges.txt"
_BESIDE = ("special_tokens_map.json", "chat_template.jinja", "additional_chat_templates")
"""Files and folders beside a vocabulary, which transformers reads as they are."""
_PLAIN = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "PythonBackend")
"""Classes that do not say how words are cut."""
_EARLY = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The special tokens of a `tekken.json` that lists none."""
_OF_MISTRAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_END = "<|endoftext|>"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
)
_FILLS = {
    _END: 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276,
}  # fmt: skip
_CHANNELS = {
    "<|startoftext|>": 199998, _END: 199999, "<|return|>": 200002, "<|constrain|>": 200003, "<|channel|>": 200005,
    "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008, "<|call|>": 200012, "<|endofprompt|>": 200018,
}  # fmt: skip
_RESERVED = {f"<|reserved_{i}|>": i for i in range(200000, 201088) if i not in _CHANNELS.values()}


@dataclasses.dataclass(frozen=True)
class _Known:
    """What a `.tiktoken` file does not say.

    Attributes:
      pattern: the pattern that cuts words.
      special: the ids of special tokens; those that `tokenizer_config.json` lists come first.
      composed: whether a text is put into Unicode's form NFC.
    """

    pattern: str
    special: Mapping[str, int]
    composed: bool = False


_FILES = {
    "r50k_base": _Known(SPLITS["gpt-2"][0], {_END: 50256}),
    "p50k_base": _Known(SPLITS["gpt-2"][0], {_END: 50256}),
    "cl100k_base": _Known(_CL100K, _FILLS),
    "o200k_base": _Known(SPLITS["gpt-4o"][0], {_END: 199999, "<|endofprompt|>": 200018}),
    "qwen": _Known(SPLITS["qwen2"][0], {_END: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}, True),
}
"""By the name of the file."""
_MODELS = {
    "gpt_oss": _Known(SPLITS["gpt-4o"][0], _CHANNELS | _RESERVED),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), _FILES["qwen"]),
}
"""By the model's type, which comes first."""


def found(folder: Path) -> Path | None:
    """The file of a vocabulary that `load` reads, or None.

    Raises:
      ModelError: if there are several.
    """
    for names in ((VOCAB, MERGES), (TEKKEN,)):
        if all((folder / name).is_file() for name in names):
            return folder / names[0]
    ranked = sorted(folder.glob("*.tiktoken"))
    if len(ranked) > 1:
        raise ModelError(f"{folder} has several vocabularies, {', '.join(one.name for one in ranked)}: leave one there")
    return ranked[0] if ranked else None


def load(file: Path) -> Any:
    """The tokenizer of a file that `found` has found, transformers' own.

    Raises:
      ModelError: if a file is malformed, or does not say how words are cut.
    """
    if file.name == VOCAB:
        return _of_class(file.parent)
    return _loaded(file.parent, *(_tekken(file) if file.name == TEKKEN else _tiktoken(file, file.parent)))


def _of_class(folder: Path) -> Any:
    """The tokenizer of `vocab.json` and `merges.txt`, by the class that the folder names or the model's type has."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    vocab, named = read_json(folder / VOCAB), _settings(folder).get("tokenizer_class")
    for name in (named, TOKENIZER_MAPPING_NAMES.get(_model_type(folder))):
        own = name.removesuffix("Fast") if isinstance(name, str) and name not in _PLAIN else ""
        if hasattr(transformers, own):
            made = _read_by(getattr(transformers, own), folder)
            if vocab.keys() <= made.get_vocab().keys():
                return made
            if name == named:
                raise ModelError(
                    f"{folder}: tokenizer_class {named} does not read {VOCAB} and {MERGES}; fetch its own files"
                )
    _LOG.warning("%s names no tokenizer_class: words are cut as by GPT-2, in training perhaps otherwise", folder)
    absent = _END not in vocab  # GPT-2's class would add it after the model's tokens
    bare = dict.fromkeys(("unk_token", "bos_token", "eos_token")) if absent else {}
    return _read_by(transformers.GPT2Tokenizer, folder, **bare)


def _read_by(kind: Any, folder: Path, **given: Any) -> Any:
    """What a class of transformers makes of a folder."""
    try:
        return kind.from_pretrained(str(folder), **given)
    except Exception as error:  # the tokenizers library raises bare Exception on a malformed file
        raise _unread(folder / VOCAB, error) from error


def _tekken(file: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a `tekken.json`, and its named tokens."""
    whole = read_json(file)
    try:
        config, listed = whole["config"], whole.get("special_tokens")
        special = (
            list(_EARLY) if listed is None else [one["token_str"] for one in sorted(listed, key=lambda x: x["rank"])]
        )
        count, size = config.get("default_num_special_tokens", len(special)), config.get("default_vocab_size")
        size = len(whole["vocab"]) + count if size is None else size
        pieces = [base64.b64decode(one["token_bytes"], validate=True) for one in whole["vocab"][: size - count]]
        pattern = config["pattern"]
        ordered = listed is None or sorted(one["rank"] for one in listed) == list(range(len(listed)))
        if not ordered or len(special) > count or len(pieces) != size - count:
            raise ValueError(f"{len(special)} special tokens and {len(pieces)} others are not the {size} of its config")
        if len(set(pieces)) < len(pieces):
            raise ValueError("a token is there twice")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unread(file, error) from error
    special += [f"<SPECIAL_{i}>" for i in range(len(special), count)]
    ids = {token: i for i, token in enumerate(special)}
    made = _made(file, {piece: count + i for i, piece in enumerate(pieces)}, pattern, ids)
    named = {name: token for name, token in _OF_MISTRAL.items() if token in ids}
    if "bos_token" in named:
        begin = named["bos_token"]
        made.post_processor = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A $B:1", [(begin, ids[begin])])
    return made, named


def _tiktoken(file: Path, folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a `.tiktoken` file, and its named tokens."""
    kind = _model_type(folder)
    if kind not in _MODELS and file.stem not in _FILES:
        raise ModelError(
            f"{file} does not say how words are cut: known are {', '.join(f'{name}.tiktoken' for name in _FILES)}, and "
            f"such files of the models {', '.join(_MODELS)}; fetch or make a tokenizer.json"
        )
    known = _MODELS[kind] if kind in _MODELS else _FILES[file.stem]
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line.strip()]
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
        if len(ranks) < len(lines):
            raise ValueError("a token is there twice")
    except ValueError as error:
        raise _unread(file, error) from error
    given = _settings(folder).get("added_tokens_decoder")
    try:
        own = {one["content"]: int(i) for i, one in (given or {}).items()}
        shown_too = [one["content"] for one in (given or {}).values() if not one.get("special", True)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unread(folder / "tokenizer_config.json", error) from error
    special = own or known.special
    made = _made(file, ranks, known.pattern, special, shown_too)
    if known.composed:
        made.normalizer = normalizers.NFC()
    return made, {"eos_token": _END} if _END in special else {}


def _made(
    file: Path, ranks: Mapping[bytes, int], pattern: Any, special: Mapping[str, int], shown_too: Collection[str] = ()
) -> Tokenizer:
    """The tokenizer that joins the neighbours whose joined bytes have the lowest rank.

    Args:
      file: where the ranks are from.
      ranks: of bytes, their ids.
      pattern: what cuts words.
      special: the ids of tokens that are found in a text before it is cut.
      shown_too: those of them that a text without special tokens keeps.
    """
    letters = _letters()
    lacking = 256 - sum(len(piece) == 1 for piece in ranks)
    odd = [i for i in (*ranks.values(), *special.values()) if not is_id(i)]
    twice = len({*ranks.values(), *special.values()}) < len(ranks) + len(special)
    if lacking or odd or twice:
        what = (
            f"{lacking} bytes have no token"
            if lacking
            else f"{shown(odd[0])} is no id"
            if odd
            else "an id is used twice"
        )
        raise ModelError(f"{file} cannot be read ({what}); fetch it again, or remove it")
    pieces = {"".join(letters[byte] for byte in piece): rank for piece, rank in ranks.items()}
    pairs = merge_pairs(pieces, {rank: -rank for rank in ranks.values()})
    try:
        made = Tokenizer(models.BPE({**pieces, **special}, pairs, ignore_merges=True))
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        raise _unread(file, error) from error
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    ordered = sorted(special, key=special.__getitem__)
    made.add_tokens([AddedToken(token, normalized=False, special=token not in shown_too) for token in ordered])
    return made


def _letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's vocabulary: itself if it is visible, otherwise one after 255."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def _loaded(folder: Path, made: Tokenizer, named: Mapping[str, Any]) -> Any:
    """Transformers' tokenizer around it, with what the folder's other files say."""
    from transformers import PreTrainedTokenizerFast

    settings = {key: x for key, x in _settings(folder).items() if key not in ("tokenizer_class", "auto_map")}
    older = folder / "chat_template.json"
    template = read_json(older).get("chat_template") if older.is_file() else None
    settings = {**({} if template is None else {"chat_template": template}), **named, **settings}
    with tempfile.TemporaryDirectory() as place:
        made.save(str(Path(place) / "tokenizer.json"))
        (Path(place) / "tokenizer_config.json").write_text(json.dumps(settings))
        for name in _BESIDE:
            if (folder / name).is_dir():
                shutil.copytree(folder / name, Path(place) / name)
            elif (folder / name).is_file():
                shutil.copy(folder / name, Path(place) / name)
        try:
            return PreTrainedTokenizerFast.from_pretrained(place, clean_up_tokenization_spaces=False)
        except Exception as error:  # see above
            raise _unread(folder / "tokenizer_config.json", error) from error


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _model_type(folder: Path) -> str:
    file = folder / "config.json"
    return str(read_json(file).get("model_type")) if file.is_file() else ""


def _unread(file: Path, error: Exception) -> ModelError:
    said = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
    return ModelError(f"{file} cannot be read ({said}); fetch it again, or remove it")
