"""The engine for Tunix: its interface without the package, and with it where it is installed."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from support.conformance import DRAFTERS, TARGET, params, same
from support.margin import teacher_forced

import specjax
from specjax.rollouts import samples, tunix
from specjax.rollouts.tunix import Actor, TunixRollout

PAD, BOS, EOS = 0, 1, 2
PROMPTS = ["7 3 9", "7 3 9", "11 5", "11 5"]
WIDTH, NEW, HEAT = 8, 5, 0.9


class Words:
    """A tokenizer with the methods that Tunix asks for: tokens are numbers."""

    encode = staticmethod(lambda text: [int(word) for word in text.split()])
    decode = staticmethod(lambda ids: " ".join(map(str, ids)))
    pad_id, bos_id, eos_id = (staticmethod(lambda own=own: own) for own in (PAD, BOS, EOS))


def config(**options):
    """The fields of `RolloutConfig` that count, with its defaults."""
    usual = {
        "max_tokens_to_generate": NEW, "temperature": HEAT, "top_p": 1.0, "top_k": None, "seed": None,
        "max_prompt_length": WIDTH, "eos_tokens": None, "return_logprobs": True, "data_type": None,
    }  # fmt: skip
    return SimpleNamespace(**usual | options)


def made(drafter=None, others=None, actor=None, **options):
    actor = actor or Actor(TARGET, params()["target"])
    decoder = specjax.speculative(TARGET, drafter)
    given = {"rollout_actor": actor, "tokenizer": Words(), "mesh": None, "rollout_config": config(**options)}
    return TunixRollout(decoder=decoder, others=others, **given)


def padded(tokens):
    """Completions as Tunix pads them, `[B, T]`."""
    return jnp.asarray([[*row, *[PAD] * (NEW - len(row))] for row in (own.tolist() for own in tokens)])


@pytest.mark.slow
def test_it_generates_and_scores_as_tunix_asks():
    own = made()
    first = own.generate(PROMPTS, config(seed=jax.random.key(4)))
    assert first.left_padded_prompt_tokens.tolist()[1:3] == [[0] * 4 + [BOS, 7, 3, 9], [0] * 5 + [BOS, 11, 5]]
    assert first.text == [" ".join(map(str, row.tolist())) for row in first.tokens] and first.logits is None
    eos = int(first.tokens[0][2])
    cut = own.generate(PROMPTS, config(seed=jax.random.key(4), eos_tokens=[eos]))
    wanted = [row.tolist() for row in first.tokens]
    same([row.tolist() for row in cut.tokens], [row[: row.index(eos)] if eos in row else row for row in wanted])
    assert [len(row) for row in cut.logprobs] == [len(row) for row in cut.tokens]
    scores = own.get_per_token_logps(jnp.asarray(first.left_padded_prompt_tokens), padded(first.tokens))
    for row, ids in enumerate(first.tokens):
        np.testing.assert_allclose(scores[row, : len(ids)], first.logprobs[row], atol=1e-5)
        begin = first.left_padded_prompt_tokens[row]
        begin = begin[begin != PAD].tolist()
        logits = teacher_forced(TARGET, params()["target"], [*begin, *ids.tolist()])[len(begin) - 1 : -1]
        right = jax.nn.log_softmax(jnp.asarray(logits) / HEAT)[jnp.arange(len(ids)), ids]
        np.testing.assert_allclose(first.logprobs[row], right, atol=2e-5)
    before = samples._program._cache_size()
    again, later = (own.generate(PROMPTS, config()) for _ in range(2))
    assert again.text != later.text  # without a seed calls differ
    own.update_params(jax.tree.map(lambda x: x * 0.5, nnx.state(own.model(), nnx.Param)), (nnx.Param,))
    assert own.generate(PROMPTS, config(seed=jax.random.key(4))).text != first.text
    assert samples._program._cache_size() == before
    assert (own.pad_id(), own.eos_id()) == (PAD, EOS)


def test_a_part_of_the_parameters_changes_those_alone():
    own = made()
    old = own.params["target"]
    name = next(name for name in own.model().weights if name.startswith("layers/1") and "kernel" in name)
    own.update_params({"weights": {name: own.model().weights[name][...] + 1}})
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), old, own.params["target"])
    assert sum(jax.tree.leaves(changed)) == 1
    with pytest.raises(ValueError, match="the actor has no parameter weights/nothing"):
        own.update_params({"weights": {"nothing": jnp.ones(3)}})


def test_the_first_call_takes_what_the_trainer_has_read_since():
    """Tunix reads a checkpoint into its module after it has made the engine."""
    actor = Actor(TARGET, params()["target"])
    own, times = made(actor=actor), lambda factor: jax.tree.map(lambda x: x * factor, nnx.state(actor, nnx.Param))
    nnx.update(actor, times(0.5))
    own.update_params({})
    wanted = jax.tree.map(lambda x: x * 0.5, params()["target"])
    chex.assert_trees_all_equal(own.params["target"], wanted)
    nnx.update(actor, times(3.0))
    own.update_params({})
    chex.assert_trees_all_equal(own.params["target"], wanted)
    own.update_params(nnx.state(actor, nnx.Param))
    state = nnx.to_pure_dict(nnx.state(own.model(), nnx.Param))
    chex.assert_trees_all_equal(tunix.target_of(flatten_dict(state)), own.params["target"])


@pytest.mark.parametrize(
    ("ids", "size"),
    (([[1], [1], [2], [2]], 2), ([[1], [1], [1], [2]], 1), ([[1], [1], [1], [1], [2], [2]], 2), ([[1]] * 3, 3)),
)
def test_runs_of_equal_prompts_are_groups(ids, size):
    assert tunix._group(ids) == size


@pytest.mark.slow
def test_drafts_change_no_text():
    wanted = made().generate(PROMPTS, config(seed=5, top_k=9, top_p=0.9))
    got = made(DRAFTERS["suffix-shared"]).generate(PROMPTS, config(seed=5, top_k=9, top_p=0.9))
    assert got.text == wanted.text
    drafted = made(DRAFTERS["eagle3"], {"draft": params("eagle3")["draft"]})
    assert drafted.generate(PROMPTS, config(seed=5, top_k=9, top_p=0.9)).text == wanted.text


@pytest.mark.slow
def test_the_actor_sees_no_padding():
    """Rows that are padded on the left have the logits of their texts alone, and a gradient."""
    actor, text = Actor(TARGET, params()["target"]), [5, 9, 4, 11]
    tokens = jnp.asarray([[PAD, PAD, *text]])
    real = tokens != PAD
    at = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    mask = real[:, None] & jnp.tril(jnp.ones((6, 6), bool))[None]
    logits, cache = actor(tokens, at, None, mask)
    np.testing.assert_allclose(logits[0, 2:], teacher_forced(TARGET, params()["target"], text), atol=2e-5)
    slopes = nnx.grad(lambda actor: actor(tokens, at, None, mask)[0][:, 2:].sum())(actor)
    assert cache is None and all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))


@pytest.mark.slow
def test_tunix_takes_it_and_scores_alike():
    """Of the real package: its type of engine, its configuration, its weights' way, and its trainer's log-probabilities."""
    base = pytest.importorskip("tunix.rl.rollout.base_rollout", reason="Tunix is missing: pip install 'specjax[tunix]'")
    from tunix.rl import common, utils

    actor, decoder = Actor(TARGET, params()["target"]), specjax.speculative(TARGET, DRAFTERS["suffix-shared"])
    taken = base.RolloutConfig(max_tokens_to_generate=NEW, max_prompt_length=WIDTH, return_logprobs=True)
    made = tunix.engine(decoder)
    assert issubclass(made.func, base.BaseRollout)
    own = made(rollout_actor=actor, tokenizer=Words(), mesh=None, rollout_config=taken)
    assert not utils.is_sharing_weights(actor, own.model())  # otherwise `RLLearner` never syncs weights
    with jax.transfer_guard_device_to_host("disallow_explicit"), jax.transfer_guard_host_to_device("disallow_explicit"):
        own.update_params(nnx.state(actor, (nnx.Param,)), (nnx.Param,))  # as `RLCluster.sync_weights` does
    out = own.generate(PROMPTS, taken)
    graph, state = nnx.split(actor)
    prompts, completions = jnp.asarray(out.left_padded_prompt_tokens), padded(out.tokens)
    theirs = common.compute_per_token_logps(
        graph, state, prompts, completions, pad_id=PAD, eos_id=EOS, temperature=taken.temperature
    )
    for row, ids in enumerate(out.tokens):
        np.testing.assert_allclose(theirs[row, : len(ids)], out.logprobs[row], atol=2e-5)
    assert {field for field in base.RolloutOutput.__dataclass_fields__} == set(vars(out))
