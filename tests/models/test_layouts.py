"""Tables of embeddings lie row by row, and computations take them as they lie."""

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from specjax.models.layouts import by_rows


def order(x):
    return x.format.layout.major_to_minor


@pytest.mark.parametrize("places", (1, 2))
def test_a_table_is_laid_out_again_and_its_rows_are_the_same(places):
    mesh = jax.make_mesh((places,), ("model",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:places])
    split = jax.NamedSharding(mesh, jax.P("model"))
    table = np.arange(48.0, dtype=np.float32).reshape(8, 6)
    columns = jax.device_put(jax.device_put(table, split), Format(Layout(major_to_minor=(1, 0)), split))
    params = {"embed": {"embedding": columns}, "head": {"kernel": columns}}
    found = by_rows(params, platform="cpu")
    rows = found["embed"]["embedding"]
    assert order(columns) == (1, 0) and order(rows) == (0, 1) and rows.sharding == split
    assert found["head"] is params["head"]
    np.testing.assert_array_equal(rows, table)
    look_up = jax.jit(lambda table, ids: table[ids])
    ids = np.array([5, 0, 7])
    assert "{0,1}" not in look_up.lower(rows, ids).compile().as_text().split("\n")[0]
    np.testing.assert_array_equal(look_up(rows, ids), table[ids])
    assert order(jax.device_put(rows, split)) == (0, 1)  # placed once more, as a decoder does, it stays so


def test_other_tables_stay_as_they_are():
    """One that is the head too, and any on a platform whose default is by rows."""
    params = {"embed": {"embedding": jax.device_put(np.ones((8, 6), np.float32))}}
    assert by_rows(params, platform="cpu") is params
    whole = {**params, "head": {"kernel": params["embed"]["embedding"]}}
    assert by_rows(whole)["embed"]["embedding"] is params["embed"]["embedding"]
