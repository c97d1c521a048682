"""The published layout of Falcon (Bestpay-inc/Falcon)."""

from typing import Any

import numpy as np

from specjax.draft.eagle.published import layer_of
from specjax.draft.heads.layout import Layout, Reader, Sure
from specjax.models.errors import ModelError


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a Falcon head.

    The authors' code gives torch's LSTM the rows of a batch in the place of time, and drafts for one row. So the LSTM
    begins empty at every pair, and its recurrent matrices are multiplied by zeros: they are not kept.
    """
    own = layer_of(reader, config, target, "k_mask")
    block, size = config.get("k_mask"), own.hidden_size
    if not isinstance(block, int) or isinstance(block, bool) or block < 2:
        raise ModelError(
            f"{reader.file}: k_mask, the tokens of a block, must be a whole number of at least 2, not {block!r}"
        )
    cells = {i: _cells(reader, i, size, config.get("bias", True)) for i in range(2)}
    params = {"lstm": cells, "layer": reader.layer("layers.0", own, size)}
    return {"config": own, "block": block, "carries": False}, params


def _cells(reader: Reader, i: int, size: int, biased: bool) -> dict[str, Any]:
    """One layer; torch adds a bias to each of its two products."""
    take = lambda name, *shape, **more: reader.take(f"lstm.{name}_l{i}", shape, **more)
    enter = {"kernel": take("weight_ih", size if i else 2 * size, 4 * size, transpose=True)}
    take("weight_hh", size, 4 * size, transpose=True)
    bias = take("bias_ih", 4 * size) + take("bias_hh", 4 * size) if biased else np.zeros((4 * size,), np.float32)
    return {"enter": {**enter, "bias": bias}}


LAYOUT = Layout(
    read,
    said=lambda config: Sure.OWN if "k_mask" in config else Sure.NO,
    held=lambda names: "lstm.weight_ih_l0" in names,
)
