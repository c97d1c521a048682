"""Steps compiled for chips that are not here, and what every such program must be."""

import importlib.util

import pytest

from specjax import models
from specjax.decode import Speculate
from specjax.draft import PromptLookup
from specjax.models import loading
from specjax.plan import step
from specjax.sharding import aot, make_mesh

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiles for a TPU: pip install 'specjax[aot]'"
)


def skip_without_compiler(topology):
    """Ends a test where the extra that compiles for these chips is not installed."""
    chip = aot.chip_of(topology)
    if chip.compilers and not aot.can_compile(chip):
        pytest.skip(f"{chip.compilers[0]} compiles for a {chip.name}: pip install 'specjax[aot]'")


class FullChain(PromptLookup):
    """Always reads all 16 nodes: the costliest branch of a step, the one that a plan counts, and nothing else to compile."""

    @property
    def rungs(self):
        return (self.nodes,)


def setup_of(name, topology, layers):
    devices = aot.devices(topology)
    mesh = make_mesh(f"model={len(devices)}", devices)
    model = models.abstract(name, "bfloat16", mesh)
    model = loading.with_layers(model, layers, mesh)
    return step.prepare(model, Speculate(FullChain(length=15)), mesh, batch=8, context=8192)


def check(setup):
    """No copy of a cache, nothing gathered, two reductions a layer; returns the cost, the traffic and what a chip holds."""
    program, traffic = step.compiled(setup)
    layers, held = setup.decoder.target.num_layers, step.sizes(setup)
    assert program.memory_analysis().alias_size_in_bytes >= held.cache
    cache = setup.state.cache.key[0]
    assert traffic.written(cache.sharding.shard_shape(cache.shape)) == []
    # besides the layers': the looked-up embeddings, and the greatest logit and its index
    assert {kind: entry["count"] for kind, entry in traffic.collectives.items()} == {"all-reduce": 2 * layers + 3}
    rows = 8 * 16 * setup.decoder.target.config.hidden_size * 2
    assert traffic.collectives["all-reduce"]["bytes"] < (4 * layers + 2) * rows  # activations only, in float32 at most
    return step.cost_of(program, traffic), traffic, held
