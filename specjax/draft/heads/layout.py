"""The common part of published heads: the description of a layout, and reading one.

Reading takes tensors by name, the flags of a `config.json`, and a decoder layer's names. Linear layers are stored
`[out, in]`; ours are `[in, out]`. Every tensor and every flag of a file is accounted for.
"""

import dataclasses
import enum
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.draft.heads.files import STEMS, config_file, read_tensors
from specjax.models import hf_config
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import switches
from specjax.models.few_bits import plain
from specjax.sharding.distributed import to_host

_ROWS = 8192  # rows of a table that are compared at a time: a real table has a gigabyte
_ATTENTION = ("q", "k", "v", "o")
_MLP = ("gate", "up", "down")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The families of models whose decoder layers heads are made of."""
# Fields of a config.json that say nothing about a head, or that `hf_config` reads.
NEUTRAL = frozenset(
    "architectures model_type torch_dtype dtype transformers_version _name_or_path name_or_path base_model_name_or_path "
    "version version_2 use_cache pretraining_tp initializer_range auto_map bos_token_id eos_token_id pad_token_id "
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings vocab_size "
    "attention_bias attention_dropout mlp_bias max_window_layers sliding_window use_sliding_window layer_types qkv_bias "
    "target_model_type model_max_length max_sequence_length".split()
)


class Sure(enum.IntEnum):
    """How surely a `config.json` says that its head is for a drafter. The surest drafter has it, on a tie the first
    exported.
    """

    NO = 0
    OF_TARGET = 1  # by a field that targets have too
    SHARED = 2  # by a field that files of other heads may have
    NAMED = 3  # by the head's name
    OWN = 4  # by a field that only files of its kind have


Read = Callable[["Reader", dict[str, Any], Any], tuple[dict[str, Any], Any]]
Write = Callable[[str | os.PathLike[str], str, Any, Any, Any, Any], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the published heads of a drafter are recognised, read and written.

    Attributes:
      read: from a head's tensors, its `config.json` and its target to fields and parameters of the drafter.
      said: how surely a `config.json` without the name of one of our drafters describes such a head.
      held: whether tensors with these names are such a head's, if no `config.json` says it.
      what: how an error describes such a head when its files are read as another drafter's; they are recognised by
        their drafter's name in `architectures`. Empty: nothing is looked for.
      beside: other names, of other heads or of layers, that its own `architectures` may contain.
      keep: given the target, which tensors of a folder are the head's, by name; None: all.
      stems: the names of its files, in addition to `specjax.draft.heads.files.STEMS`.
      together: the names of files that hold a head together, none of them alone; no two have tensors of one name.
      formats: those that it can be written in, with a writer for each. The writer takes a folder, the format, the bound
        drafter, its parameters, the target and a type. It returns what other engines may not do with the head, one
        sentence each.
    """

    read: Read
    said: Callable[[Mapping[str, Any]], Sure] = lambda config: Sure.NO
    held: Callable[[Collection[str]], bool] = lambda names: False
    what: str = ""
    beside: tuple[str, ...] = ()
    keep: Callable[[Any], Callable[[str], bool]] | None = None
    stems: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    formats: Mapping[str, Write] = dataclasses.field(default_factory=dict)


def named(config: Mapping[str, Any], word: str) -> bool:
    """Whether `architectures` of a `config.json` contain the word, or it is speculators' type of the head."""
    return config.get("speculators_model_type") == word or word in str(config.get("architectures")).lower()


class Reader:
    """Tensors by name; a tensor that was not taken is an error.

    Attributes:
      folder: of the head.
      chosen: fields of the drafter that the user set.
      tensors: those that were not taken yet; from the start only those of `keep`, if a target's lie beside them.
      problems: what was missing or misshapen so far.
      format: the layout's name, if the drafter's name does not say it.
      notes: what a user should know about how the file was read, one sentence each.
      foreign: fields that models' config files have and no head's code reads; heads' files copy some from their
        target's.
    """

    def __init__(
        self, folder: Path, chosen: dict[str, Any] | None = None, keep: Callable[[str], bool] | None = None,
        foreign: Collection[str] = (), stems: Sequence[str] = STEMS, together: Sequence[str] = (),
    ):  # fmt: skip
        self.folder, self.chosen, self.foreign = folder, chosen or {}, switches.NAMES.union(foreign)
        self.tensors = {
            name: x for name, x in read_tensors(folder, stems, together).items() if keep is None or keep(name)
        }
        self.problems: list[str] = []
        self.format = ""
        self.notes: list[str] = []

    @property
    def file(self) -> Path:
        """Its `config.json`, see `config_file`."""
        return config_file(self.folder)

    def take(self, name: str, shape: tuple[int, ...], transpose: bool = False) -> np.ndarray:
        array = self.tensors.pop(name, None)
        stored = shape[::-1] if transpose else shape
        if array is None:
            self.problems.append(f"missing {name} {list(stored)}")
        elif array.shape != stored:
            self.problems.append(f"{name} has shape {list(array.shape)}, expected {list(stored)}")
        else:
            return array.T if transpose else array
        return np.zeros(shape, np.float32)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> dict[str, np.ndarray]:
        """A `{name}.weight`, and `{name}.bias` if there must be one."""
        made = {"kernel": self.take(f"{name}.weight", (inputs, outputs), transpose=True)}
        return {**made, "bias": self.take(f"{name}.bias", (outputs,))} if bias else made

    def scale(self, name: str, size: int) -> dict[str, np.ndarray]:
        return {"scale": self.take(f"{name}.weight", (size,))}

    def attention(self, at: str, config: Any, inputs: int) -> dict[str, Any]:
        """A decoder layer's attention; `inputs` is the width that it reads."""
        own = config.near
        heads, kv = own.num_attention_heads * own.head_dim, own.num_key_value_heads * own.head_dim
        shapes = {"q": (inputs, heads), "k": (inputs, kv), "v": (inputs, kv), "o": (heads, config.hidden_size)}
        biased = {"q": own.qkv_bias, "k": own.qkv_bias, "v": own.qkv_bias, "o": own.o_bias}
        made = {n: self.linear(f"{at}.self_attn.{n}_proj", *shapes[n], bias=biased[n]) for n in _ATTENTION}
        if own.qk_norm is not None:
            made |= {n: self.scale(f"{at}.self_attn.{n}", own.head_dim) for n in ("q_norm", "k_norm")}
        return made

    def layer(self, at: str, config: Any, inputs: int, outputs: int = 1) -> dict[str, Any]:
        """A decoder layer without its first norm.

        Args:
          at: the beginning of its tensors' names.
          config: its `ModelConfig`.
          inputs: the width that attention reads.
          outputs: how many vectors of the layer's width its MLP writes.
        """
        size, inner = config.hidden_size, config.dense.intermediate_size
        wide = {"gate": (size, inner), "up": (size, inner), "down": (inner, outputs * size)}
        attention = self.attention(at, config, inputs)
        mlp = {n: self.linear(f"{at}.mlp.{n}_proj", *wide[n], bias=config.dense.bias) for n in _MLP}
        norm = self.scale(f"{at}.post_attention_layernorm", size)
        return {"attention": attention, "mlp": mlp, "mlp_norm": norm}

    def check_copy(self, name: str, target: Any) -> None:
        """Checks a file's copy of the target's embedding: it is not read, but tells which target the head belongs to.

        Raises:
          ModelError: if it is another table.
        """
        copy = self.tensors.pop(name, None)
        if copy is not None and not is_embedding(copy, target):
            raise ModelError(
                f"{self.folder}: {name} is not the embedding of {target.name!r}: the head belongs to another target"
            )

    def finish(self) -> None:
        """Raises ModelError for everything that was missing, misshapen or not taken."""
        problems = self.problems + [f"unknown {name} {list(array.shape)}" for name, array in self.tensors.items()]
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ModelError(f"{self.folder}: the head's tensors do not fit: {'; '.join(problems[:8])}{more}")


def is_embedding(table: np.ndarray, target: Any) -> bool:
    """Whether a table is the target's embedding, up to rounding to 16 bits; without the target's weights, whether it
    has its shape.
    """
    vocab = target.lm.vocab_size
    if target.abstract or table.shape != (vocab, target.lm.config.hidden_size):
        return table.shape == (vocab, target.lm.config.hidden_size)
    for first in range(0, vocab, _ROWS):
        ids = np.arange(first, min(first + _ROWS, vocab), dtype=np.int32)
        own = to_host(target.lm.embed(target.params, ids[None])[0])
        if not np.allclose(np.asarray(table[ids], np.float32), np.asarray(own, np.float32), rtol=0.02, atol=1e-3):
            return False
    return True


def is_head(kernel: np.ndarray, target: Any) -> bool:
    """Whether `[E, V]` is the target's language-model head, up to rounding to 16 bits.

    Without the target's weights, whether it has its shape.
    """
    if target.abstract or target.lm.config.head.tied:
        return is_embedding(kernel.T, target)
    own = plain(target.params["head"]["kernel"])
    columns = [slice(first, first + _ROWS) for first in range(0, own.shape[1], _ROWS)]
    near = lambda a, b: np.allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0.02, atol=1e-3)
    return kernel.shape == own.shape and all(near(kernel[:, c], to_host(own[:, c])) for c in columns)


def check_flags(reader: Reader, config: dict[str, Any], *known: str) -> None:
    """Raises ModelError for a flag that is neither neutral nor known, nor a model's."""
    others = set(config) - NEUTRAL - set(known)
    unknown = sorted(others - reader.foreign)
    if unknown:
        raise ModelError(f"{reader.file} has the unknown flag {unknown[0]!r} ({config[unknown[0]]!r})")
    if others:
        reader.notes.append(
            f"has fields of a target's config that no such head's code reads: {', '.join(sorted(others))}"
        )


def layer_config(reader: Reader, config: dict[str, Any], target: Any, layers: int = 1) -> Any:
    """The `ModelConfig` of a head's layers, without windows. Its vocabulary, the tokens that it reads, must be the target's.

    `architectures` names the head's own class, and says nothing about the layer in it.

    Raises:
      ModelError: for fields that the layer cannot have, and for another vocabulary.
    """
    known = {key: value for key, value in config.items() if key in NEUTRAL and key != "architectures"}
    family = known.get("model_type", "llama")
    known |= {"model_type": family if family in FAMILIES else "llama", "num_hidden_layers": layers}
    known |= {"layer_types": None, "sliding_window": None, "use_sliding_window": False}
    own = hf_config.from_hf(known)
    if own.vocab_size != target.lm.vocab_size:
        raise ModelError(
            f"{reader.file}: vocab_size: the head reads {own.vocab_size} tokens, {target.name!r} has "
            f"{target.lm.vocab_size}: it belongs to another target"
        )
    biased = bool(config.get("qkv_bias", config.get("attention_bias", False)))
    normed = any(name.endswith("self_attn.q_norm.weight") for name in reader.tensors)
    return own.every(AttentionConfig, window=None, qkv_bias=biased, qk_norm=own.norm if normed else None)


def check_width(reader: Reader, width: int, target: Any, key: str = "hidden_size") -> None:
    """Raises ModelError if a head reads features of another width than the target's; `key` is the field that says it."""
    size = target.lm.config.hidden_size
    if width != size:
        raise ModelError(
            f"{reader.file}: {key}: the head is {width} wide and {target.name!r} {size}: it belongs to another target"
        )
