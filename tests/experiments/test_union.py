"""The page says what its results do, and the unions of a model's tokens are counted as they are."""

import jax
import numpy as np
import pytest

from experiments.union import __main__ as union
from specjax import models
from specjax.models.block_ffn import BlockFFNConfig
from specjax.models.layer import LayerConfig
from specjax.models.model_config import llama_config


def test_the_page_has_its_tables():
    page = union.RESULTS.with_name("README.md").read_text()
    for rows in union.json.loads(union.RESULTS.read_text()).values():
        assert "\n".join(union.table(rows)) in page


@pytest.mark.slow
def test_unions_of_a_chain_and_of_siblings():
    config = llama_config(64, 32, 48, 2, 2, 2, 16).every(LayerConfig, feed=BlockFFNConfig(6, 4))
    lm = models.LlamaLM(config)
    model = models.Model(lm, lm.init(jax.random.key(0)))
    ids = np.random.default_rng(0).integers(0, 64, 64).tolist()
    one, *more = union.unions(model, ids)
    assert 0 < one["chain"] < 6 and 0 < one["siblings"] < 6 == one["experts"]
    for name in ("chain", "siblings"):
        sizes = [row[name] for row in (one, *more)]
        assert sizes == sorted(sizes) and sizes[-1] <= 6
    plain = models.LlamaLM(llama_config(64, 32, 48, 2, 2, 2, 16))
    with pytest.raises(ValueError, match="no layer of this model is a BlockFFN"):
        list(union.unions(models.Model(plain, plain.init(jax.random.key(0))), ids))


def test_a_row_of_costs():
    rows = list(union.costs(sizes=((16, 4, 8),), repeats=1))
    assert [row["union"] for row in rows if row["rows"] == 8] == [0, 1, 2, 3]
    assert {row["union_bytes"] / row["dense_bytes"] for row in rows if row["union"] == 1} == {0.25}
    assert {row["union_bytes"] / row["dense_bytes"] for row in rows if row["union"] == 3} == {1.0}
