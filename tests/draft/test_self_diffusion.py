"""Self-speculation: what a drafting pass sees, in which order positions are written, adapters, and the original's runs."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import diffusion_traces as traces
from support import small_target as small
from support import small_training as tiny

import specjax
from specjax import models
from specjax.assembly import registry
from specjax.draft import SelfDiffusion
from specjax.draft.self_diffusion import replaced
from specjax.expand import Chain, TopK
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Masked, ModelError
from specjax.models.ropes import QueryScale
from specjax.sampling.noise import gumbel
from specjax.serve.engine import Engine

safetensors = pytest.importorskip("safetensors.numpy")

MASK, DRAFTS = small.TARGET.vocab_size - 1, 4
FOLDER = traces.FOLDER / "nemotron_labs"
needs_traces = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="needs the folder diffusion_traces in shared/data beside this checkout"
)


@functools.partial(jax.jit, static_argnums=1)
def whole_pass(tokens, known):
    """Logits `[T, V]` of one pass over a text whose last tokens see each other, without the mask."""
    size = tokens.shape[0]
    visible = jnp.tril(jnp.ones((size, size), bool)).at[known:, known:].set(True)
    block = Block(tokens[None], jnp.arange(size)[None], jnp.zeros(1, jnp.int32), visible[None])
    logits = small.TARGET(small.weights(), block, None, wants=Wants(logits=True)).logits[0]
    return logits.at[:, MASK].set(-jnp.inf)


def written(text, threshold, heat, noise):
    """The published loop by whole passes: the draft after a text, and how many passes it takes."""
    block, passes = np.full(DRAFTS, MASK), 0
    while MASK in block:
        logits = np.asarray(whole_pass(jnp.asarray([*text, *block.tolist()]), len(text) - 1))[len(text) :]
        chances = np.asarray(jax.nn.softmax(logits))
        chosen = (logits / heat + noise if heat else logits).argmax(axis=1)
        sure = np.where(block == MASK, chances[np.arange(DRAFTS), chosen], -1)
        now = (sure >= threshold) & (block == MASK)
        now[sure.argmax()] = True
        block, passes = np.where(now, chosen, block), passes + 1
    return block.tolist(), passes


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_a_draft_is_that_of_whole_passes(threshold):
    """A greedy row and drawn ones, whose positions have their own noise."""
    decoder = specjax.speculative(small.TARGET, SelfDiffusion(MASK, Chain(DRAFTS), threshold))
    model = {"target": small.weights(), "draft": None}
    state, step = small.begin(decoder, model), jax.jit(decoder.step)
    counts = set()
    for _ in range(2):
        before, (state, info) = state, step(model, state)
        for row, heat in enumerate(small.HEATS):
            size = int(before.length[row])
            at = jnp.asarray([size + np.arange(DRAFTS)])
            noise = np.asarray(gumbel(before.key[row : row + 1], at, small.TARGET.vocab_size))[0]
            want, passes = written(before.tokens[row, :size].tolist(), threshold, heat, noise)
            assert info.tree.tokens[row, 1:].tolist() == want
            counts.add(passes)
    assert counts == {0.0: {1}, 1.0: {DRAFTS}}.get(threshold, counts) and (threshold != 0.3 or len(counts) > 1)


def test_fields():
    with pytest.raises(ValueError, match=r"self_diffusion needs a threshold in \[0, 1\], got 1.5"):
        SelfDiffusion(MASK, threshold=1.5)
    for fields, said in (
        ({"mask_id": 24}, "mask 24 is outside the target's 24 tokens"),
        ({"mask_id": -1}, "mask -1 is outside"),
        (
            {"mask_id": 1, "expander": TopK(k=24, depth=1, nodes=9)},
            "takes 24 candidates of a distribution over 23 tokens",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            SelfDiffusion(**fields).bind(small.TARGET)


def test_a_line_names_the_mask_or_the_target_does():
    target = tiny.model(tiny.TARGET, tiny.target_params())
    drafter, own = registry.build_drafter("self_diffusion:mask=7,length=3,threshold=0.5", target)
    assert (drafter.mask_id, drafter.nodes, drafter.threshold, own) == (7, 4, 0.5, None)
    both = dataclasses.replace(target, dual=Masked(5, shift=False, block=8, align="prompt_end", causal_context=True))
    assert registry.build_drafter("self_diffusion", both)[0].mask_id == 5
    assert registry.build_drafter("self_diffusion", both)[0].expander == Chain(31)
    for line, said in (
        ("self_diffusion", "drafts with a model of both kinds, and 'tiny' does not say that .*self_diffusion:mask=ID"),
        ("self_diffusion:mask=x", "mask must be the id of a token of the target, got 'x'"),
        ("self_diffusion:mask=32", "mask 32 is outside the target's 32 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            registry.build_drafter(line, target)


def lora(folder, target, names, rank=3):
    """A published adapter's files: matrices for the `[out, in]` tensors `names`; returns what they add."""
    rng, arrays, added = np.random.default_rng(1), {}, {}
    for name in names:
        size = target.lm.config.hidden_size
        a, b = (rng.normal(0, 0.4, shape).astype(np.float32) for shape in ((rank, size), (size, rank)))
        module = f"base_model.model.{name}"
        arrays |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        added[name] = (2 * b @ a).T
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    safetensors.save_file(arrays, folder / "adapter_model.safetensors")
    return added


@pytest.mark.slow
def test_an_adapter_is_for_the_drafting_pass_alone(tmp_path):
    """It lies in the model's folder, as published: drafts are those of the merged model, and the text is the target's."""
    how = Masked(31, shift=False, block=8, align="prompt_end", causal_context=True)
    grown = tiny.TARGET.config.every(models.AttentionConfig, query_scale=QueryScale(0.3, 5))  # so Ministral 3's layers
    models.save(tmp_path / "model", LlamaLM(grown), tiny.target_params(), diffusion=how)
    target = models.load(tmp_path / "model", dtype="float32")
    names = [f"encoder.layers.{i}.self_attn.o_proj" for i in range(2)]
    added = lora(tmp_path / "model" / "linear_spec_lora", target, names)
    line = "self_diffusion:length=4,adapter=linear_spec_lora"
    drafter, own = registry.build_drafter(line, target)
    assert drafter.adapted and list(own["layers"]) == [0, 1]
    assert jax.tree.structure(own["layers"][0]) == jax.tree.structure({"attention": {"o": {"kernel": 0}}})
    for i, name in enumerate(names):
        before = target.params["layers"][i]["attention"]["o"]["kernel"]
        np.testing.assert_allclose(own["layers"][i]["attention"]["o"]["kernel"], before + added[name], atol=1e-5)

    prompt = [3, 1, 4, 1, 5, 3, 1, 4]
    engine = Engine(target, line)
    before = engine.start([engine.request(prompt, max_new_tokens=8, ignore_eos=True)])
    step = jax.jit(engine.decoder.step)
    state, info = step(engine.params, before)
    assert before.length.tolist() == [8]
    drafts = {}
    for name, params in {"bare": target.params, "adapted": replaced(target.params, own)}.items():
        tokens, at = jnp.asarray([[prompt[7], *[31] * 4]]), 7 + jnp.arange(5)[None]
        block = Block(tokens, at, jnp.full(1, 7), causal=False)  # what was read of the text has no adapter
        logits = target.lm(params, block, before.cache, wants=Wants(logits=True)).logits[0, 1:, :31]
        drafts[name] = logits.argmax(axis=1).tolist()
    assert info.tree.tokens[0, 1:].tolist() == drafts["adapted"] != drafts["bare"]
    while not bool(state.done.all()):
        state, _ = step(engine.params, state)
    (plain,) = specjax.generate(
        target, [prompt], decode="plain", max_new_tokens=8, sampling=specjax.Sampling(ignore_eos=True)
    )
    assert state.tokens[0, 8:16].tolist() == list(plain.tokens)

    lora(tmp_path / "other", target, ["encoder.layers.7.self_attn.o_proj"])
    with pytest.raises(
        ModelError, match="does not fit the model: .*layers.7.self_attn.o_proj.weight is no linear layer"
    ):
        registry.build_drafter(f"self_diffusion:adapter={tmp_path / 'other'}", target)
    with pytest.raises(ModelError, match="kept in few bits, and take no adapter: load it with weights='plain'"):
        registry.build_drafter(line, models.quantised(target, "int8"))
    abstract = models.abstract(tmp_path / "model")
    with pytest.raises(ModelError, match="an adapter needs a model of the Llama family that was read"):
        registry.build_drafter(line, abstract)


PASSES = []


@dataclasses.dataclass(frozen=True)
class Counting(LlamaLM):
    """Notes each pass over a block that sees itself whole."""

    def __call__(self, params, block, cache, **options):
        if not block.causal:
            jax.debug.callback(lambda: PASSES.append(1))
        return super().__call__(params, block, cache, **options)


SETTINGS = sorted({line["setting"] for line in traces._every_line() if line["sampler"] == "self_spec"})


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_originals_runs(setting):
    """Tokens, what each verification gave, and passes, of every setting of `linear_spec_generate`; the first token, which
    the original takes from its prefill, belongs to the prompt here."""
    model = models.load(FOLDER, dtype="float32")
    model = dataclasses.replace(
        model, lm=Counting(**{f.name: getattr(model.lm, f.name) for f in dataclasses.fields(model.lm)})
    )
    lines = traces.lines_of(setting)
    said = lines[0]["settings"]
    engine = Engine(model, f"self_diffusion:length={said['block_length'] - 1},threshold={said['threshold']}")
    step = jax.jit(engine.decoder.step, compiler_options={"xla_backend_optimization_level": 0})
    for line in lines:
        begin = [*line["prompt"], line["tokens"][0]]
        # a step may write beyond the original's limit, which it is cut at only afterwards
        room = line["gen_length"] - 1 + said["block_length"]
        with traces.small_programs():
            state = engine.start([engine.request(begin, max_new_tokens=room, ignore_eos=True)])
        PASSES.clear()
        accepted = []
        while sum(accepted) < line["gen_length"] - 1:
            before, (state, _) = state, step(engine.params, state)
            accepted.append(int(state.length[0] - before.length[0]))
        jax.effects_barrier()
        text = state.tokens[0, len(line["prompt"]) :][: line["gen_length"]].tolist()
        assert text == line["tokens"] and accepted == line["accepted"]
        assert 1 + len(accepted) + len(PASSES) == line["passes"]
