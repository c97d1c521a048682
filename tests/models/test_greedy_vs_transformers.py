"""Greedy text of every drafter equals `transformers`', family by family, alone and in a ragged batch."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from support import tiny_families
from support.conformance import Rows, start, texts
from support.margin import Margin, teacher_forced

import specjax
from specjax.draft import (
    Eagle,
    Eagle3,
    Kangaroo,
    Medusa,
    ModelDrafter,
    NoDrafter,
    PromptLookup,
    Swift,
    TokenRecycling,
    Trained,
    fuse,
)
from specjax.expand import Chain, Static, TopK
from specjax.models.llama import LlamaLM
from specjax.sampling import SamplingArrays

STORIES = Path(__file__).parents[2].parent / "shared" / "data" / "stories260K"
FAMILIES = tuple(name for name in tiny_families.FAMILIES if name != "llama_biases")
LENGTHS = (3, 9, 14, 21, 1)
NEW, LONG = 24, 40
"""New tokens, and those of models with running states."""
DRAFTERS = ("none", "prompt_lookup", "token_recycling", "chain", "static", "top_k", "eagle2", "fuse")


HEADS = {
    "eagle1": Eagle(),
    "eagle3": Eagle3(),
    "kangaroo": Kangaroo(exit_layer=1),
    "medusa": Medusa(),
    "swift": Swift(),
}
"""Fresh heads, and layers that are skipped: what they do not share with the target's layers must still fit."""
OF_EACH_KIND = ("llama2", "glm4_moe", "gemma4_small", "gpt_oss", *tiny_families.HYBRIDS)
"""Alike layers, experts, shared keys, sinks with rings, and running states."""
# every family with a tree and with plain decoding, one of each kind as its own draft; every other drafter with two or more
RAGGED = [(family, name) for family in FAMILIES for name in ("token_recycling", "none")]
RAGGED += [(family, "static") for family in OF_EACH_KIND]
RAGGED += [
    ("qwen3", "static"),
    ("llama2", "prompt_lookup"),
    ("llama2", "eagle2"),
    ("llama3", "fuse"),
    ("mistral", "top_k"),
    ("mistral", "eagle2"),
    ("qwen2", "prompt_lookup"),
    ("qwen2", "top_k"),
    ("qwen2", "fuse"),
    ("gemma2", "chain"),
    ("gemma3n_text", "kangaroo"),
    ("gpt_oss", "chain"),
    ("gpt_neox", "swift"),
    ("phi", "kangaroo"),
    ("gpt2", "eagle1"),
    ("stablelm_parallel", "eagle3"),
    ("modernbert-decoder", "medusa"),
    ("modernbert-decoder", "swift"),
    ("mamba", "static"),
    ("mamba2", "prompt_lookup"),
    ("granite4_h", "chain"),
    ("jamba", "fuse"),
    ("jamba", "prompt_lookup"),
    ("falcon_h1", "static"),
    ("falcon_h1", "swift"),
    ("nemotron_h", "top_k"),
    ("nemotron_h", "swift"),
    ("nemotron_h", "prompt_lookup"),
]
ALONE = (("llama2", "none"), ("llama3", "chain"), ("mistral", "fuse"), ("qwen2", "static"))


def drafter(name, model):
    """A drafter for this model; drafts come from all but its last layer."""
    config = model.lm.config
    layers = config.num_hidden_layers - 1
    small = LlamaLM(config.first(layers))
    params = {**model.params, "layers": {i: model.params["layers"][i] for i in range(layers)}}
    if "layer_inputs" in params:
        cut = lambda x, shape: x[..., : shape.shape[-1]]
        params["layer_inputs"] = jax.tree.map(cut, params["layer_inputs"], small.abstract()["layer_inputs"])
    made = {
        "none": NoDrafter(),
        "prompt_lookup": PromptLookup(length=4, min_ngram=1),
        "token_recycling": TokenRecycling(k=4),
        "chain": ModelDrafter(small, Chain(3)),
        "static": ModelDrafter(small, Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))),
        "top_k": ModelDrafter(small, TopK(k=3, depth=3, nodes=8)),
        "eagle2": ModelDrafter(small, TopK(k=3, depth=3, nodes=8, coupled=False)),
        "fuse": fuse(TokenRecycling(k=4, tree="2 | 1 1"), ModelDrafter(small, Chain(2))),
    }
    if name in HEADS:
        chosen = HEADS[name].bind(model.lm)
        fresh = chosen.init_params(jax.random.key(0), model.params) if isinstance(chosen, Trained) else {}
        return HEADS[name], {"target": model.params, "draft": fresh}
    return made[name], {"target": model.params, "draft": (None, params) if name == "fuse" else params}


def length_of(family):
    """How many tokens are compared."""
    return LONG if family in tiny_families.HYBRIDS else NEW


@pytest.fixture(scope="module")
def oracle(references):
    """`oracle(family)`: our model, ragged prompts, transformers' greedy text, teacher-forced logits, and the margin."""
    made = {}

    def get(family):
        if family in made:
            return made[family]
        reference = references(family)
        model = specjax.models.load(reference.folder)
        rng = np.random.default_rng(len(family))
        prompts = [rng.integers(3, 128, n).tolist() for n in LENGTHS]
        wanted, logits, eps, spread = [], [], 0.0, 1.0
        for prompt in prompts:
            wanted.append(reference.greedy(prompt, length_of(family)))
            text = [*prompt, *wanted[-1]]
            theirs = reference.logits([text])[0]
            logits.append(theirs)
            eps = max(eps, float(np.abs(theirs - teacher_forced(model.lm, model.params, text)).max()))
            spread = max(spread, float(theirs.std()))
        made[family] = model, prompts, wanted, logits, Margin(eps, spread)
        return made[family]

    return get


@functools.partial(jax.jit, static_argnums=0)
def finished(decoder, params, state):
    """Steps to the end; the compiler knows that nothing is sampled, which halves its work."""
    greedy = SamplingArrays.make(state.length.shape[0])
    step = lambda state: decoder.step(params, dataclasses.replace(state, sampling=greedy))[0]
    return jax.lax.while_loop(lambda state: ~state.done.all(), step, dataclasses.replace(state, sampling=greedy))


def check(oracle, family, name, rows):
    model, prompts, wanted, logits, margin = oracle(family)
    chosen, params = drafter(name, model)
    new = length_of(family)
    batch = Rows(tuple(tuple(prompts[i]) for i in rows), tuple(map(str, rows)), ({},) * len(rows), new)
    decoder = specjax.speculative(model.lm, chosen)
    got = texts(finished(decoder, params, start(decoder, batch, model=params, capacity=40 + new)))
    for i, text in zip(rows, got, strict=True):
        margin.compare(text, wanted[i], logits[i], len(prompts[i]))
    margin.close()


def cases(pairs, *fast):
    return [pytest.param(*pair, marks=() if pair in fast else pytest.mark.slow, id="-".join(pair)) for pair in pairs]


@pytest.mark.parametrize(("family", "name"), cases(RAGGED, ("gemma2", "chain")))
def test_ragged_batch(oracle, family, name):
    check(oracle, family, name, range(5))


@pytest.mark.parametrize(("family", "name"), cases(ALONE))
def test_one_row(oracle, family, name):
    check(oracle, family, name, [2])


def test_the_pairs_are_enough():
    for name in DRAFTERS:
        assert len({family for family, drafter in RAGGED if drafter == name}) >= 2, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ("none", "top_k"))
def test_stories(name):
    """A small trained model, whose greedy text is known; `test_shipped.py` has another with other drafters."""
    if not STORIES.is_dir():
        pytest.skip("needs the folder stories260K in shared/data beside this checkout")
    known = json.loads((STORIES / "known_answers.json").read_text())["greedy_ids"]
    model = specjax.models.load(STORIES)
    chosen, params = drafter(name, model)
    begin = (1, 20, 3, 60, 9)
    batch = Rows(tuple(tuple(known[:n]) for n in begin), tuple(map(str, begin)), ({},) * 5, 120)
    decoder = specjax.speculative(model.lm, chosen)
    got = texts(finished(decoder, params, start(decoder, batch, model=params, capacity=256)))
    logits = teacher_forced(model.lm, model.params, known[:200])
    margin = Margin(3e-5, float(logits.std()))
    for n, text in zip(begin, got, strict=True):
        margin.compare(text, known[n : n + 120], logits, n)
    margin.close()
