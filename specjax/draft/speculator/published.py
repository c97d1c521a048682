"""Published speculators: IBM's (foundation-model-stack/fms-extras) and Snowflake's (ArcticTraining, ArcticInference).

Files name a step's part `emb.0.weight`, or `emb.0.0.weight` where it is the first of a sequence. What steps share is
written once, or once for each step.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.draft.heads.layout import Layout, Reader, Sure, check_flags, check_width
from specjax.models.errors import ModelError
from specjax.models.fields import is_size

_FLAGS = (
    "n_predict", "n_candidates", "num_lookahead_tokens", "top_k_tokens_per_head", "emb_dim", "inner_dim", "proj_dim",
    "input_hidden_dim", "tie_weights", "tie_wts", "tie_lstm_embs", "scale_input", "method", "base_model_arch",
    "base_model_archs",
)  # fmt: skip
_OF = {"sum_rnn": "mlp_speculator", "sum_lstm": "lstm_speculator"}
_GATES = ("forget", "input", "output", "cell")
_NORM = {"scale": "weight", "bias": "bias"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a `config.json` says.

    Attributes:
      heads: steps.
      width: E, of the target's features.
      inner: D, of the states.
      vocab: V.
      scale_input: as in the drafter.
      tied: whether the steps share their weights.
    """

    heads: int
    width: int
    inner: int
    vocab: int
    scale_input: bool
    tied: bool

    @property
    def fields(self) -> dict[str, Any]:
        """Those of the drafter."""
        return {"heads": self.heads, "inner": self.inner, "scale_input": self.scale_input}


def read_mlp(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an MLP speculator."""
    own = _sizes(reader, config, target, "sum_rnn")
    last = ".0" if "emb.0.0.weight" in reader.tensors else ""

    def part(name: str, steps: list[int], *shape: int, kind: str = "weight", transpose: bool = False) -> np.ndarray:
        return _one(reader, [f"{name}.{i}{last}.{kind}" for i in steps], shape, transpose)

    def norm(steps: list[int]) -> dict[str, np.ndarray]:
        return {kind: part("ln", steps, own.inner, kind=name) for kind, name in _NORM.items()}

    def proj(steps: list[int]) -> dict[str, np.ndarray]:
        return {"kernel": part("proj", steps, own.inner if steps[0] else own.width, own.inner, transpose=True)}

    every = _shared(own)
    params = {
        "embeds": [{"embedding": part("emb", steps, own.vocab, own.inner)} for steps in every],
        "proj": [proj(steps) for steps in _shared(own, apart=1)],
        "norms": [norm(steps) for steps in every],
        "heads": _heads(reader, own),
    }
    return {**own.fields, "tied": own.tied}, params


def read_lstm(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an LSTM speculator. Its file has a projection, and perhaps a table, for each gate."""
    own = _sizes(reader, config, target, "sum_lstm")
    if not own.tied:
        raise ModelError(
            f"{reader.file}: tie_weights is false, but the steps of an LSTM speculator share their weights"
        )
    one_table = bool(config.get("tie_lstm_embs", False))
    names = [f"{gate}_emb.0.weight" for gate in _GATES]
    tables = [_one(reader, group, (own.vocab, own.inner)) for group in ([names] if one_table else [[n] for n in names])]

    def norm(at: str) -> dict[str, np.ndarray]:
        return {kind: reader.take(f"{at}.0.{name}", (own.inner,)) for kind, name in _NORM.items()}

    def proj(j: int, width: int) -> dict[str, np.ndarray]:
        each = [reader.take(f"{gate}_proj.{j}.weight", (width, own.inner), transpose=True) for gate in _GATES]
        return {"kernel": np.concatenate(each, axis=1)}

    params = {
        "embed": {"embedding": np.concatenate(tables, axis=1)},
        "proj": [proj(0, own.width), proj(1, own.inner)],
        "cell_norm": norm("cell_ln"),
        "state_norm": norm("state_ln"),
        "heads": _heads(reader, own),
    }
    return {**own.fields, "one_table": one_table}, params


def _sizes(reader: Reader, config: dict[str, Any], target: Any, method: str) -> Sizes:
    """The sizes of a file, whose tensors lose the prefix `speculator.`.

    Raises:
      ModelError: for a file of the other kind, of another target, or with several layers in a step.
    """
    check_flags(reader, config, *_FLAGS)
    said = config.get("method", "sum_rnn")
    if said != method:
        kind = f"is for {_OF[said]}" if said in _OF else f"is unknown: known are {' and '.join(_OF)}"
        raise ModelError(f"{reader.file}: the head's method {said!r} {kind}, and {_OF[method]} reads {method!r}")
    if "n_predict" not in config:
        raise ModelError(f"{reader.file}: n_predict is missing, the number of tokens that the head drafts")
    heads, vocab = config["n_predict"], target.lm.vocab_size
    if not is_size(heads):
        raise ModelError(f"{reader.file}: n_predict is {heads!r}, and a head drafts at least one token")
    if config.get("vocab_size", vocab) != vocab:
        raise ModelError(
            f"{reader.file}: vocab_size: the head reads {config['vocab_size']} tokens, {target.name!r} has {vocab}: it "
            "belongs to another target"
        )
    arctic = "input_hidden_dim" in config
    key = "input_hidden_dim" if arctic else "emb_dim"
    width = _dim(reader, config, key)
    check_width(reader, width, target, key)
    inner = _dim(reader, config, "inner_dim", 0) or width
    for other in ("emb_dim", "proj_dim") if arctic else ():
        if _dim(reader, config, other, inner) != inner:
            raise ModelError(
                f"{reader.file}: {other} is {config[other]!r} and inner_dim {config.get('inner_dim')!r}: their vectors are "
                "added, so these must be equal"
            )
    reader.tensors = {name.removeprefix("speculator."): x for name, x in reader.tensors.items()}
    tied = bool(config.get("tie_weights", config.get("tie_wts", False)))
    return Sizes(heads, width, inner, vocab, bool(config.get("scale_input", False)), tied)


def _dim(reader: Reader, config: dict[str, Any], key: str, default: Any = None) -> int:
    """A width: a number, or a list or text like `4096.4096` of the widths of several layers, of which one is read."""
    value = config.get(key, default)
    parts = value if isinstance(value, list) else str(value).split(".")
    if len(parts) != 1:
        raise ModelError(f"{reader.file}: {key} is {value!r}: only heads with one layer in each step are read")
    width = str(parts[0])
    if not width.isdecimal():
        raise ModelError(f"{reader.file}: {key} must be a width, not {value!r}")
    return int(width)


def _shared(own: Sizes, apart: int = 0) -> list[list[int]]:
    """The steps that have a part in common: with tied weights all after the first `apart`, otherwise none."""
    alone = min(apart, own.heads) if own.tied else own.heads
    rest = list(range(alone, own.heads))
    return [*([i] for i in range(alone)), *([rest] if rest else [])]


def _heads(reader: Reader, own: Sizes) -> list[dict[str, np.ndarray]]:
    """The output layers, whose names are the same in all files."""
    named = lambda steps: [f"head.{i}.weight" for i in steps]
    return [{"kernel": _one(reader, named(steps), (own.inner, own.vocab), transpose=True)} for steps in _shared(own)]


def _one(reader: Reader, names: list[str], shape: tuple[int, ...], transpose: bool = False) -> np.ndarray:
    """A part that several names stand for: the first one in the file, which the others must equal."""
    first, *copies = [name for name in names if name in reader.tensors] or names[:1]
    made = reader.take(first, shape, transpose)
    for name in copies:
        if not np.array_equal(reader.take(name, shape, transpose), made):
            reader.problems.append(f"{name} differs from {first}, and the file says that they are one")
    return made


def _said(method: str) -> Callable[[Mapping[str, Any]], Sure]:
    own = lambda config: "n_predict" in config and config.get("method", "sum_rnn") == method
    return lambda config: Sure.OWN if own(config) else Sure.NO


MLP_LAYOUT = Layout(read_mlp, said=_said("sum_rnn"))
LSTM_LAYOUT = Layout(read_lstm, said=_said("sum_lstm"))
