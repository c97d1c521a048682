"""The cache write in whole steps for TPUs: one call for all layers, and no loop over rows beside it."""

import json
import re

import jax
import pytest
from support.planned import needs_libtpu

from specjax import models
from specjax.decode import Plain, Speculate
from specjax.kernels.layouts import slots_last
from specjax.plan import step
from specjax.sharding import aot, make_mesh

slow = pytest.mark.slow
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip
CASES = [
    ("v5e:1x1", "model=1", "prompt_lookup", None, 128),
    ("v5e:2x2", "data=2,model=2", "prompt_lookup", "int8", 128),
    ("v6e:1x1", "model=1", "none", None, 64),
    pytest.param("v5e:2x2", "context=2,model=2", "none", None, 128, marks=slow),
    pytest.param("v5p:2x2x1", "data=2,model=2", "prompt_lookup", None, 128, marks=slow),
    pytest.param("v6e:1x1", "model=1", "prompt_lookup", "float8_e4m3fn", 128, marks=slow),
    pytest.param("v5e:2x2", "context=2,model=2", "prompt_lookup", "int8", 64, marks=slow),
    pytest.param("v5p:2x2x1", "data=2,model=2", "none", None, 96, marks=slow),
]
"""Chips, mesh, drafter, the cache's type, and the width of heads."""


@needs_libtpu
@pytest.mark.parametrize(("topology", "mesh", "drafter", "cache_dtype", "width"), CASES)
def test_a_step_writes_the_cache_in_one_call(topology, mesh, drafter, cache_dtype, width, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": width}))
    mesh = make_mesh(mesh, aot.devices(topology))
    model = models.abstract(str(tmp_path), "bfloat16", mesh, cache_dtype=cache_dtype)
    setup = step.prepare(model, Speculate(drafter), mesh, batch=4, context=512)
    program, traffic = step.compiled(setup)
    text = program.as_text()
    assert len(re.findall(r"%kv_commit[\w.]* = .*custom-call\(", text)) == 1
    assert not re.findall(r" while\(", text)
    assert program.memory_analysis().alias_size_in_bytes >= step.sizes(setup).cache
    cache = jax.tree.leaves(setup.state.cache.key[0])[0]
    own = cache.sharding.shard_shape(cache.shape)
    rows, heads, slots, width = own
    turned = (rows, heads, width, slots), (rows, heads * width, slots)
    for shape in (own, *(turned if slots_last(slots, width) else ())):
        copies = [access.op.name for access in traffic.written(shape) if not access.op.name.startswith("kv_commit")]
        dims = ",".join(map(str, shape))
        in_vmem = re.findall(rf"\[{dims}\]{{[^}}]*S\(1\)", text)
        assert re.findall(rf"\[{dims}\]", text) and not copies and not in_vmem


@needs_libtpu
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=slow)])
def test_one_row_is_multiplied_by_the_matrix_unit(tied, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    mesh = make_mesh("model=1", aot.devices("v5e:1x1"))
    model = models.abstract(str(tmp_path), "bfloat16", mesh)
    program, _ = step.compiled(step.prepare(model, Plain(), mesh, batch=1, context=512))
    text = program.as_text()
    assert len(re.findall(r" convolution\(.*dot_general", text)) == 2 * 7 + 1
    assert not re.findall(r"multiply_reduce_fusion.*dot_general", text)
