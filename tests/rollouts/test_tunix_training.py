"""Whole GRPO trainings by Tunix's own learner, with the engine of this package: of its module, and of Tunix's Qwen 3."""

import chex
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import AxisType
from support.conformance import TARGET, params
from support.other_models import drawn, tunix_net

import specjax
from specjax.draft import Suffix
from specjax.models import of_library
from specjax.rollouts import samples, tunix

PAD, BOS, EOS, WANTED = 0, 1, 2, 9
PROMPTS = ["7 3 9", "11 5", "4 4 4 8", "9"]
WIDTH, NEW, GROUP, UPDATES = 8, 6, 4, 6
DRAFTER = Suffix(pieces=16, piece=16)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # those of Tunix


class Words:
    """A tokenizer with the methods that Tunix asks for: tokens are numbers."""

    encode = staticmethod(lambda text: [int(word) for word in text.split()])
    decode = staticmethod(lambda ids: " ".join(map(str, ids)))
    pad_id, bos_id, eos_id = (staticmethod(lambda own=own: own) for own in (PAD, BOS, EOS))


def ours():
    """A module of this package, what decodes it, and how its state becomes the decoder's parameters."""
    return tunix.Actor(TARGET, params()["target"]), TARGET, tunix.target_of


def of_tunix():
    """The same of Tunix's Qwen 3, which is read in place."""
    config, net = tunix_net("qwen3")
    state = nnx.state(net, nnx.Param)
    nnx.update(net, drawn(state))
    return net, of_library(state, config), unflatten_dict


def cluster_of(net, reference, decoder, target):
    """Tunix's actor, reference and engine on one device."""
    from tunix.rl import rl_cluster as clusters
    from tunix.rl.rollout.base_rollout import RolloutConfig

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:1])
    roles = dict.fromkeys((clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT), mesh)
    training = clusters.RLTrainingConfig(actor_optimizer=optax.adam(2e-2), eval_every_n_steps=1000, max_steps=1000)
    config = clusters.ClusterConfig(
        role_to_mesh=roles,
        rollout_engine=tunix.engine(decoder, target=target),
        training_config=training,
        rollout_config=RolloutConfig(max_tokens_to_generate=NEW, max_prompt_length=WIDTH, temperature=1.0),
    )
    return clusters.RLCluster(actor=net, reference=reference, tokenizer=Words(), cluster_config=config)


@pytest.fixture
def mixed_ranks():
    """Tunix adds arrays of different ranks, in threads of its own too."""
    before = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", before)


@pytest.mark.parametrize("made", (ours, of_tunix))
def test_tunix_trains_with_its_samples(made, mixed_ranks):
    """Each batch is drawn with the weights of the update before it, by one program; and the reward rises."""
    grpo = pytest.importorskip(
        "tunix.rl.grpo.grpo_learner", reason="Tunix is missing: pip install 'specjax[tunix]'", exc_type=ImportError
    )
    net, lm, target = made()
    cluster = cluster_of(net, nnx.clone(net), specjax.speculative(lm, DRAFTER), target)
    engine, means = cluster.rollout, []
    trained = lambda: target(tunix._flat(nnx.state(cluster.actor_trainer.model, nnx.Param)))
    seen = [trained()]

    def reward(prompts, completions, **more):
        chex.assert_trees_all_equal(engine.params["target"], trained())
        seen.append(trained())
        shares = [np.mean([word == str(WANTED) for word in text.split()] or [0.0]) for text in completions]
        means.append(np.mean(shares))
        return shares

    config = grpo.GRPOConfig(num_generations=GROUP, num_iterations=2, beta=0.01)
    begun = samples._program._cache_size()
    grpo.GRPOLearner(cluster, config, reward).train([{"prompts": np.array(PROMPTS)}] * UPDATES)
    chex.assert_trees_all_equal(engine.params["target"], trained())
    assert len(means) == engine.calls == UPDATES and cluster.actor_trainer.train_steps == 2 * UPDATES
    assert samples._program._cache_size() == begun + 1
    changed = [jax.tree.map(lambda a, b: bool((a != b).any()), *pair) for pair in zip(seen[1:], seen[2:], strict=False)]
    assert all(any(jax.tree.leaves(own)) for own in changed) and len(changed) == UPDATES - 1
    assert np.mean(means[-2:]) > np.mean(means[:2]) + 0.2
