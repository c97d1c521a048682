"""Tokenizers that need only the `tokenizers` package: transformers takes seconds to import and may never be needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from specjax.models import chat_template
from specjax.models.json_file import read_json

_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes that consist of `tokenizer.json` and nothing more."""
_MODELS = ("llama", "qwen3", "smollm3", "Dream", "a2d-qwen3")
"""Model types for which transformers uses the tokenizer class that the folder names."""
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token")
_ENDS = ("add_bos_token", "add_eos_token")
_KNOWN = {
    *_NAMED,
    *_ENDS,
    "tokenizer_class",
    "clean_up_tokenization_spaces",
    "model_max_length",
    "chat_template",
}
"""Fields of `tokenizer_config.json` that are handled here; with any other field, transformers loads the tokenizer."""
_MORE = ("special_tokens_map.json", "added_tokens.json")
"""Files that add to `tokenizer.json`."""
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")
"""Files that may accompany or replace the template in `tokenizer_config.json`."""
_MOST = 100_000  # tokens: with more, transformers may correct the pattern that splits words


class PlainTokenizer:
    """A `tokenizer.json` with transformers' results.

    The `tokenizers` package answers the most frequent calls. The first other call loads transformers' own tokenizer,
    which answers everything from then on.

    Args:
      backend: the tokenizer in `tokenizer.json`.
      load: makes transformers' tokenizer.
      template: the chat template if jinja2 alone renders it; None: transformers renders it.
    """

    def __init__(self, backend: Tokenizer, load: Callable[[], Any], template: str | None = None):
        vars(self).update(_backend=backend, _load=load, _template=template, _whole=None)

    def whole(self) -> Any:
        """Transformers' tokenizer."""
        if self._whole is None:
            vars(self)["_whole"] = self._load()
        return self._whole

    def encode(self, text: Any, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """The ids of a text; see `transformers.PreTrainedTokenizerBase.encode`."""
        if self._whole is None and isinstance(text, str) and not options.keys() - {"verbose"}:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self.whole().encode(text, add_special_tokens=add_special_tokens, **options)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        """The text of ids; see `transformers.PreTrainedTokenizerBase.decode`."""
        ours = isinstance(token_ids, list) and not any(options.values())
        if self._whole is None and ours and not any(isinstance(i, list) for i in token_ids[:1]):
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.whole().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)

    def get_vocab(self) -> dict[str, int]:
        """The id of every token, added tokens included."""
        return self._backend.get_vocab() if self._whole is None else self.whole().get_vocab()

    @property
    def chat_template(self) -> Any:
        """The chat template, or None."""
        return self._template if self._whole is None and self._template else self.whole().chat_template

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Messages as the template writes them; see `transformers.PreTrainedTokenizerBase.apply_chat_template`."""
        ours = options.keys() <= {"add_generation_prompt", "tokenize"} and options.get("tokenize") is False
        if self._whole is None and self._template and ours and chat_template.are_plain(conversation):
            return chat_template.render(self._template, conversation, options.get("add_generation_prompt", False))
        return self.whole().apply_chat_template(conversation, **options)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.whole()(*given, **options)

    def __len__(self) -> int:
        return len(self.whole())

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by copying and pickling
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.whole(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.whole(), name, value)


def plain(folder: Path, load: Callable[[], Any]) -> PlainTokenizer | None:
    """The tokenizer of a folder if the `tokenizers` package surely gives transformers' results; otherwise None.

    Args:
      folder: see `specjax.models.tokenizer.load`.
      load: makes transformers' tokenizer.

    Raises:
      ModelError: if a file is not a JSON object.
    """
    file, settings, model = (folder / f"{name}.json" for name in ("tokenizer", "tokenizer_config", "config"))
    if not all(each.is_file() for each in (file, settings, model)) or any((folder / name).is_file() for name in _MORE):
        return None
    if read_json(model).get("model_type") not in _MODELS or not _understood(read_json(settings)):
        return None
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception:  # the library raises bare Exception; transformers' error is the one that is shown
        return None
    if not _as_it_is(backend, read_json(settings)):
        return None
    if read_json(settings).keys() & set(_ENDS):  # transformers then makes its own, here from no tokens
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    template = (
        None if any((folder / name).exists() for name in _TEMPLATES) else read_json(settings).get("chat_template")
    )
    return PlainTokenizer(backend, load, template if chat_template.is_plain(template) else None)


def _understood(settings: dict[str, Any]) -> bool:
    """Whether every field is known and has a value that changes nothing."""
    named = [settings[name] for name in _NAMED if settings.get(name) is not None]
    return (
        settings.keys() <= _KNOWN
        and settings.get("tokenizer_class") in _CLASSES
        and not any(settings.get(name) for name in (*_ENDS, "clean_up_tokenization_spaces"))
        and all(isinstance(token, str) for token in named)
    )


def _as_it_is(backend: Tokenizer, settings: dict[str, Any]) -> bool:
    """Whether transformers would leave it unchanged. Transformers adds named tokens that are missing or not special,
    and resets padding and truncation."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    return (
        {settings[name] for name in _NAMED if settings.get(name) is not None} <= special
        and backend.padding is None
        and backend.truncation is None
        and backend.get_vocab_size() <= _MOST
    )
