"""`specjax plan` over Llamas of 8B and 70B: programs of the TPU compiler, which takes minutes over them."""

import pytest
from support.planned import check, must_read, needs_libtpu, setup_of

from specjax.plan import step


@needs_libtpu
@pytest.mark.slow
def test_llama_8b_on_four_chips():
    """Two and four layers, of which the whole is extrapolated."""
    found = [
        (setup, *check(setup)) for setup in (setup_of("meta-llama/Llama-3.1-8B", "v5e:2x2", n) for n in step.LAYERS)
    ]
    line = lambda values: values[0] + (32 - 2) / (4 - 2) * (values[1] - values[0])
    moved = line([traffic.bytes for _, _, traffic, _ in found])
    need = line([must_read(setup, held) for setup, _, _, held in found])
    assert need <= moved <= 1.15 * need


@needs_libtpu
@pytest.mark.slow
def test_llama_70b_on_sixteen_chips():
    """Eight kv-heads on sixteen chips: each has one of them, and another chip has the same. Here the compiler keeps float32
    activations in main memory as well, which costs more than the small share of the weights leaves room for."""
    setup = setup_of("meta-llama/Llama-3.1-70B", "v5p:2x2x4", 2)
    assert setup.decoder.target.kv_copies == 2
    cache = setup.state.cache.key[0]
    assert cache.sharding.shard_shape(cache.shape) == (8, 1, 8192, 128)
    _, traffic, _ = check(setup)
    live = cache.sharding.shard_shape(cache.shape)[0] * setup.live * 128 * 2
    reads = [access.read for access in traffic.accesses if access.op.target == "tpu_custom_call"]
    assert len(reads) == 2 and all(2 * live <= read <= 1.05 * 2 * live for read in reads)  # keys and values once
