"""`specjax plan` over Llamas of 8B and 70B: programs of the TPU compiler, which takes minutes over them."""

import pytest
from support.planned import check, needs_libtpu, setup_of

from specjax.plan.held import chip_bytes


@needs_libtpu
@pytest.mark.slow
def test_llama_8b_on_four_chips():
    """Of two layers: weights and live cache are read once. Whatever else moves is small beside what the layers alone must read,
    so it is in a model of any depth."""
    setup = setup_of("meta-llama/Llama-3.1-8B", "v5e:2x2", 2)
    cost, traffic, held = check(setup)
    need, table = held.ideal, chip_bytes(setup.params["target"]["embed"])
    assert need <= traffic.bytes <= need + 0.15 * (need - table)  # the head is as large as the table
    assert cost.bytes == traffic.bytes and cost.temporaries < held.cache
    # two operations per weight (of two bytes) and node, but for the table, which is only looked up; and four a number
    # of the head's width, node, query head and slot
    products = 8 * 16 * (held.weights - table)
    attention = 2 * 4 * 8 * 16 * 8 * 128 * 8192
    assert 0.98 * (products + attention) < cost.flops < 1.15 * (products + attention)


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
    reads = [access.read for access in traffic.accesses if access.op.name.startswith("tree_attention")]
    assert len(reads) == 2 and all(2 * live <= read <= 1.05 * 2 * live for read in reads)  # keys and values once
