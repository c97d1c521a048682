"""The rope of a GGUF file in the form of a `config.json`."""

from typing import Any

import numpy as np

from specjax.models.errors import ModelError
from specjax.models.fields import shown
from specjax.models.gguf.header import Header
from specjax.models.gguf.keys import Fields

KEYS = (
    "rope.freq_base", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)  # fmt: skip
"""The supported keys, without the architecture's prefix."""
_LLAMA3 = 1.0, 4.0, 8192
"""`low_freq_factor`, `high_freq_factor` and `original_max_position_embeddings` of Llama 3.1 and later ones."""


def read(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    """Base, scaling and the share of a head that is rotated.

    Raises:
      ModelError: on an unsupported scaling.
    """
    width = shared["head_dim"]
    rotated = fields.size("rope.dimension_count", width)
    theta = fields.number("rope.freq_base", 10000.0)
    own = {} if rotated == width else {"partial_rotary_factor": rotated / width}
    return {"rope_theta": theta, "rope_scaling": _scaling(fields, rotated, theta)} | own


def _scaling(fields: Fields, rotated: int, theta: float) -> dict[str, Any]:
    header, none = fields.header, {"rope_type": "default"}
    if fields.has("rope_factors_long.weight") and fields.has("rope_factors_short.weight"):
        return {
            "rope_type": "longrope", "long_factor": _numbers(header, "rope_factors_long.weight"),
            "short_factor": _numbers(header, "rope_factors_short.weight"),
            "attention_factor": fields.get("rope.scaling.attn_factor"),
        }  # fmt: skip
    if fields.has("rope_freqs.weight"):
        return llama3(np.array(_numbers(header, "rope_freqs.weight")), rotated, theta, header)
    kind = fields.get("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return none
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise ModelError(f"{header.file}: the rope is scaled by {shown(kind)}, which is not read")
    magnitude = fields.get("rope.scaling.yarn_attn_factor")
    return {
        "rope_type": "yarn", "factor": factor, "truncate": header.architecture != "gpt-oss",
        "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
    } | ({} if magnitude is None else {"attention_factor": magnitude})  # fmt: skip


def _numbers(header: Header, name: str) -> list[float]:
    stored = header.tensors[name]
    if stored.kind.name != "F32" or len(stored.shape) != 1:
        raise ModelError(f"{stored.file}: {name} must be a vector of float32")
    return np.fromfile(stored.file, np.float32, stored.shape[0], offset=stored.offset).tolist()


def llama3(divisors: np.ndarray, rotated: int, theta: float, header: Header) -> dict[str, Any]:
    """The `llama3` rope that divides frequencies by these numbers.

    A file has the divisors, but not the fields from which they were computed. If Llama 3.1's fields give the same
    divisors, they are used. Otherwise the fields follow from two divisors between 1 and the greatest. Only ratios of
    the fields matter, so `low_freq_factor` is 1.

    Args:
      divisors: `[rotated / 2]`.
      rotated: how many numbers of a head are rotated.
      theta: the base.
      header: of the file, for errors.

    Raises:
      ModelError: if no fields give these divisors.
    """
    if len(divisors) != rotated // 2:
        raise ModelError(f"{header.file}: rope_freqs.weight has {len(divisors)} numbers for {rotated // 2} frequencies")
    turns = theta ** (-np.arange(0, rotated, 2) / rotated) / (2 * np.pi)  # per position
    factor = float(divisors.max())
    if factor == divisors.min() == 1:
        return {"rope_type": "default"}
    found = [_LLAMA3]
    between = np.flatnonzero((divisors > 1.0001) & (divisors < 0.9999 * factor))
    if len(between) > 1:
        parts = (1 / divisors - 1 / factor) / (1 - 1 / factor)  # the way from the scaled frequency to its own
        a, b = between[[0, -1]]
        slope = (parts[a] - parts[b]) / (turns[a] - turns[b])
        offset = slope * turns[a] - parts[a]
        if offset > 0:
            high = round(float(1 / offset + 1), 3)
            found.append((1.0, high, round(float(slope * (high - 1)))))
    for low, high, original in found:
        if original > 0 and np.allclose(_divisors(turns, factor, low, high, original), divisors, rtol=1e-3):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise ModelError(f"{header.file}: the frequencies of rope_freqs.weight match no supported rope")


def _divisors(turns: np.ndarray, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """The divisors of `llama3` for frequencies with this number of turns per position (transformers'
    `_compute_llama3_parameters`)."""
    part = np.clip((original * turns - low) / (high - low), 0, 1)
    return 1 / ((1 - part) / factor + part)
