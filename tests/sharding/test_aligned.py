"""What brings texts nearer to the distribution of a constraint writes the same on a mesh as on one device."""

import numpy as np
import pytest
from support.constraints import model

import specjax
from specjax.constrain import Hmm
from specjax.sharding import make_mesh

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [4, 4]]


def hmm_of_chance(hidden=3, vocab=1536):
    rng = np.random.default_rng(0)
    rows = lambda *shape: rng.dirichlet(np.ones(shape[-1]), shape[:-1])
    return Hmm.of("of chance", rows(hidden), rows(hidden, hidden), rows(hidden, vocab))


@pytest.mark.slow
@pytest.mark.parametrize("decode", ("smc:particles=3", "asap:samples=3,nodes=32", "plain"))
def test_a_mesh_changes_no_text(decode):
    """Rows over four parts of `data`, matrices over two of `model`; `plain` has a guide."""
    own = {"guide": hmm_of_chance()} if decode == "plain" else {}
    asked = specjax.Sampling(constraint="regex:[a-d]{1,6}(x|yz)", temperature=1.3, max_new_tokens=8, seed=3, **own)

    def records(mesh):
        engine = specjax.Engine(model(), decode, mesh=mesh)
        return engine.generate(PROMPTS, sampling=asked, batch_size=4, progress=False)

    alone, meshed = records(None), records(make_mesh("data=4,model=2"))
    assert [own.tokens for own in meshed] == [own.tokens for own in alone] and len({own.text for own in alone}) > 1
    evidence = lambda found: [own.log_evidence or 0.0 for own in found]
    np.testing.assert_allclose(evidence(meshed), evidence(alone), atol=1e-3)
    assert all(evidence(alone)) or decode == "plain"
