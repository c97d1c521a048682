"""DiffusionGemma's decoder: transformers' own generation, token for token, and what decoding promises."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import optimised
from support.conformance import but_slow
from support.small_gemma import IMAGE, V, W, saved, theirs

import specjax
from specjax import cli, models
from specjax import decoder as decoding
from specjax.bench.engines import engines_of
from specjax.bench.options import BenchOptions
from specjax.decode import Diffusion
from specjax.diffusion import CanvasDiffusion, EntropyRenoise, Prefix, Threshold
from specjax.diffusion.common import DRAW
from specjax.evaluate.run import evaluate
from specjax.models import loading
from specjax.models.diffusion_gemma import DiffusionGemmaLM
from specjax.models.gemma_config import DiffusionGemmaConfig, Heads
from specjax.plan import step as planned
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.sampling.noise import gumbel
from specjax.serve.engine import Engine
from specjax.sharding import make_mesh
from specjax.state import Finish

PROMPTS = ((3, 1, 4, 15, 9, 26, 5, 35, 8), (9, 7), (9, 3, 2, 38, 4, 6))
COUNTS = (2 * W, 3 * W, 2 * W)  # new tokens
SAMPLER = EntropyRenoise(steps=10, bound=4.0, t_min=0.1, t_max=0.5, stability=1, confidence=1.5)
CAPACITY = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("canvas") / "theirs")


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def decoder(model):
    return CanvasDiffusion(model.lm, SAMPLER, W).checked()


def begin(decoder, model, rows=(0, 1, 2), temperature=0.0, counts=COUNTS, eos=1, params=None, state=None):
    params = params or {"target": model.params}
    tokens = np.zeros((len(rows), 10), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(PROMPTS[row])] = PROMPTS[row]
    lengths = jnp.asarray([len(PROMPTS[row]) for row in rows])
    state = state or decoding.empty(decoder, params, len(rows), CAPACITY, None, 1)
    prompts = Prompts(
        jnp.asarray(tokens), lengths, row_keys(0, [str(row) for row in rows]),
        lengths + jnp.asarray([counts[row] for row in rows]), SamplingArrays.make(len(rows), temperature=temperature),
        jnp.full((len(rows), 1), eos), 4,
    )  # fmt: skip
    return decoding.insert(decoder, params, state, jnp.arange(len(rows)), prompts)


def finish(decoder, model, **settings):
    return specjax.run(decoder, {"target": model.params}, begin(decoder, model, **settings))


def texts(state):
    begins = state.prompt_length.tolist()
    return [state.tokens[i, begins[i] : int(n)].tolist() for i, n in enumerate(state.length)]


def generated(monkeypatch, decoder, row, temperature, eos):
    """transformers' `generate` with our noise: new tokens and passes over canvases."""
    torch = pytest.importorskip("torch")
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

    key = row_keys(0, [str(row)])
    noise = jax.jit(decoder._noise)
    gumbels = jax.jit(lambda key, at: gumbel(key, at, V, DRAW))
    now = {"step": 0, "start": 0, "passes": 0}
    own = generation.DiffusionGemmaGenerationMixin._prepare_denoiser_inputs

    def prepare(self, **inputs):
        cache = inputs["cache" if "cache" in inputs else "past_key_values"]  # the older name, below 5.24
        now.update(step=0, start=cache.get_seq_length())
        return own(self, **inputs)

    def positions():
        return now["start"] + jnp.arange(W)[None]

    def canvas(self, batch_size, device):
        now["step"] += 1
        return torch.tensor(np.asarray(noise(key, jnp.asarray([now["step"] - 1]), positions())), dtype=torch.long)

    def multinomial(probs, num_samples):
        now["passes"] += 1
        with np.errstate(divide="ignore"):  # a probability may round to 0
            scores = np.log(probs.numpy())
        if temperature:
            folded = jax.vmap(jax.random.fold_in)(key, jnp.asarray([now["step"] - 1]))
            scores = scores + np.asarray(gumbels(folded, positions()))[0]
        return torch.tensor(scores.argmax(axis=-1)[:, None])

    monkeypatch.setattr(generation.DiffusionGemmaGenerationMixin, "_prepare_denoiser_inputs", prepare)
    monkeypatch.setattr(generation.EntropyBoundSampler, "initialize_canvas", canvas)
    monkeypatch.setattr(torch, "multinomial", multinomial)
    p = decoder.policy
    out = theirs().generate(
        torch.tensor([PROMPTS[row]]), max_new_tokens=COUNTS[row], max_denoising_steps=p.steps,
        sampler_config=generation.EntropyBoundSamplerConfig(p.bound), t_min=p.t_min, t_max=p.t_max,
        stability_threshold=p.stability, confidence_threshold=p.confidence, eos_token_id=eos, pad_token_id=0,
        return_dict_in_generate=False,
    )  # fmt: skip
    new = out[0, len(PROMPTS[row]) :].tolist()
    return new[: new.index(eos) + 1] if eos in new else new, now["passes"], len(new) // W


@pytest.mark.parametrize("temperature", (0.0, 1.0), ids=("greedy", "drawn"))
@pytest.mark.parametrize("eos", but_slow((1, 19), 1))
def test_equal_to_transformers(monkeypatch, decoder, model, temperature, eos):
    """A ragged batch against transformers row by row: tokens, passes, and where an end of text cuts."""
    state = finish(decoder, model, temperature=temperature, eos=eos)
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        want, passes, canvases = generated(monkeypatch, decoder, row, temperature, eos)
        assert (text, steps) == (want, passes + canvases - 1)  # every canvas but the last is read once more, as text


@pytest.mark.slow
def test_the_sampler_stops_early_and_late(decoder, model):
    """The settings above try both ends of the rule, and bring sets of several sizes."""
    step, state = jax.jit(decoder.step), begin(decoder, model)
    sizes, at = set(), []
    while not bool(state.done.all()):
        live, before = ~state.done, state.step
        state, info = step({"target": model.params}, state)
        sizes |= {int(n) for n, on in zip(info.kept.sum(axis=1), live, strict=True) if on and n}
        at += [int(n) + 1 for n, done in zip(before, info.finished, strict=True) if done]
    assert SAMPLER.steps in at and min(at) < SAMPLER.steps and len(sizes) > 2


@pytest.mark.slow
@pytest.mark.parametrize("temperature", (0.0, 0.7))
def test_rows_do_not_see_each_other(decoder, model, temperature):
    together = texts(finish(decoder, model, temperature=temperature))
    assert texts(finish(decoder, model, rows=(2, 0), temperature=temperature)) == [together[2], together[0]]


@pytest.mark.slow
def test_the_optimised_program(decoder, model):
    """What users run says the same."""
    params, steps = {"target": model.params}, (jnp.int32(decoding.NO_LIMIT), jnp.int32(1))
    state = begin(decoder, model, temperature=0.7)
    program = optimised(decoding.run_program.lower(decoder, params, state, *steps))
    assert texts(program(params, state, *steps)) == texts(finish(decoder, model, temperature=0.7))


def test_a_canvas_is_cut_at_the_limit(decoder, model):
    """The same text, whatever the number of new tokens: the last canvas is read whole."""
    whole = texts(finish(decoder, model, eos=-1))
    cut = finish(decoder, model, eos=-1, counts=(W + 1, 3 * W - 1, 2))
    assert texts(cut) == [row[:n] for row, n in zip(whole, (W + 1, 3 * W - 1, 2), strict=True)]
    assert (cut.finish == Finish.LENGTH).all()
    counts = jnp.arange(W + 1)[None] * cut.stats.accepted
    assert counts.sum(axis=1).tolist() == [W + 1, 3 * W - 1, 2]


def test_a_failed_row_can_be_refilled(decoder, model):
    spoilt = {"target": jax.tree.map(lambda x: x * jnp.nan, model.params)}
    state = specjax.run(decoder, spoilt, begin(decoder, model, params=spoilt))
    assert (state.finish == Finish.ERROR).all()
    again = specjax.run(decoder, {"target": model.params}, begin(decoder, model, state=state))
    assert texts(again) == texts(finish(decoder, model))


def test_the_rule_against_plain_python():
    """What is kept, and when a canvas is final, from entropies in 64 bits."""
    policy = EntropyRenoise(steps=4, bound=0.9, stability=2, confidence=0.6)
    source = np.random.default_rng(0)
    dists = source.dirichlet([0.2] * 5, (3, 1, 7))
    dists = np.stack([dists[0], dists[1], *[dists[2]] * 4])
    memory, history = policy.init(1, 7), []
    for step, dist in enumerate(dists):
        likeliest = dist.argmax(axis=-1)
        keep, final, memory = policy(
            jnp.log(jnp.asarray(dist, jnp.float32)), jnp.asarray(likeliest), jnp.asarray([step]), memory
        )
        entropy = [-sum(p * np.log(p) for p in row if p > 0) for row in dist[0]]
        order, want, total = sorted(range(7), key=entropy.__getitem__), set(), 0.0
        for i in order:
            if total <= policy.bound:
                want.add(i)
            total += entropy[i]
        assert set(np.flatnonzero(keep[0]).tolist()) == want
        stable = len(history) >= 2 and all((likeliest == h).all() for h in history[-2:])
        assert bool(final[0]) == (stable and np.mean(entropy) < policy.confidence or step + 1 >= policy.steps)
        history.append(likeliest)
    np.testing.assert_allclose(policy.heat(jnp.arange(4)), [0.8, 0.7, 0.6, 0.5], atol=1e-6)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(dataclasses.replace(model, masked=dataclasses.replace(model.masked, sampling=(("steps", 3),))))


@pytest.mark.slow
def test_an_engine_completes(engine):
    assert engine.decoder.policy == EntropyRenoise(steps=3)
    requests = [
        engine.request(list(ids), max_new_tokens=n, ignore_eos=True) for ids, n in zip(PROMPTS, (7, 3, 13), strict=True)
    ]
    together = list(engine.run(requests))
    assert [r.new_tokens for r in together] == [7, 3, 13] and [r.finish_reason for r in together] == ["length"] * 3
    assert [r.tokens for r in engine.run(requests, batch_size=1)] == [r.tokens for r in together]


@pytest.mark.slow
def test_a_mesh_changes_nothing(engine):
    """Rows over `data`, heads, experts and vocabulary over `model`."""
    spread = Engine(engine.model, mesh="data=4,model=2")
    requests = [engine.request(list(ids), max_new_tokens=8, ignore_eos=True) for ids in PROMPTS]
    alone, together = (list(one.run(requests)) for one in (engine, spread))
    assert [r.tokens for r in alone] == [r.tokens for r in together]


@pytest.mark.slow
def test_the_command_line_generates(model, folder, capsys, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": [5, 6, 7]}) + "\n")
    words = [
        "generate",
        "--model",
        str(folder),
        "--input",
        str(tmp_path / "in.jsonl"),
        "--max-new-tokens",
        "8",
        "--json",
    ]
    assert cli.main([*words, "--decode", "entropy_renoise:steps=2"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["new_tokens"] == 8 or record["finish_reason"] == "eos"
    assert cli.main([*words, "--decode", "threshold"]) == 2
    assert "choose entropy_renoise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    (
        ({"cache": "prefix"}, "exact cache of its text"),
        ({"cache": Prefix()}, "exact cache of its text"),
        ({"guidance": 1.0}, "exact cache of its text"),
        ({"block_length": 4}, f"canvases of {W} tokens, not of 4"),
        ({"unmask": Threshold()}, "no mask: unmask must be an EntropyRenoise"),
        ({"unmask": "entropy_renoise:bound=0"}, "bound > 0"),
        ({"unmask": "entropy_renoise:t_min=2"}, "t_min <= t_max"),
        ({"unmask": "entropy_renoise:margin=2"}, "has no field 'margin'"),
    ),
)
def test_bad_settings(model, settings, said):
    with pytest.raises(ValueError, match=said):
        Engine(model, Diffusion(**settings))


def test_a_constraint_is_not_for_it(engine):
    """A pass makes a whole canvas text, whatever a constraint forbids."""
    with pytest.raises(ValueError, match="Diffusion may write tokens that a constraint forbids: leave constraint out"):
        engine.request(list(PROMPTS[0]), constraint="choice:a|b")


def test_a_drafter_is_not_for_it(model):
    with pytest.raises(ValueError, match="drafts are verified by an autoregressive one: decode with a policy"):
        Engine(model, drafter="none")


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    (
        ([3, IMAGE], {}, "holds an image"),
        ([3], {"suffix": [4]}, "cannot fill in before a suffix"),
        ([3], {"repetition_penalty": 1.2}, "no repetition_penalty"),
        ([3] * 96, {}, "more than .* has room for"),
    ),
)
def test_bad_requests(engine, prompt, options, said):
    with pytest.raises(ValueError, match=said):
        engine.request(prompt, **options)


@pytest.mark.slow
def test_the_bench_compares_samplers(folder, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": [5, 6, 7]}) + "\n")
    words = ["bench", "--model", str(folder), "--input", str(tmp_path / "in.jsonl"), "--max-new-tokens", "12", "--json"]
    words += ["--repeats", "1", "--ignore-eos"]
    assert cli.main([*words, "--decode", "entropy_renoise:steps=2"]) == 0
    published, short = json.loads(capsys.readouterr().out)["rows"]
    assert (published["decoder"], short["decoder"]) == ("entropy_renoise", "entropy_renoise:steps=2")
    assert published["ratio_to_plain"] == 1 and short["tokens_per_step"] == 12 / 5  # two canvases, one of them stored
    with pytest.raises(ValueError, match="exact cache of its text"):
        engines_of(BenchOptions(model=str(folder), decode=("entropy_renoise:cache=prefix",)))
    assert cli.main([words[0], "order", *words[1:-1]]) == 2
    assert "is text only once all of it is final" in capsys.readouterr().err


@pytest.mark.slow
def test_it_is_asked_questions(tmp_path):
    """A model that writes anything, with the shipped tokenizer."""
    heads = Heads(8, 2, 1e4, 4)
    config = DiffusionGemmaConfig(1536, 16, 16, 1, 2, (True,), 16, heads, heads, 2, 1, 8, max_position_embeddings=256)
    lm, tokenizer = DiffusionGemmaLM(config), models.load("tiny").tokenizer
    params = lm.init(jax.random.key(0))
    canvas = models.Canvas(-1, False, 8, sampling=(("steps", 2),))
    model = models.Model(lm, params, tokenizer, (5,), "canvases", tmp_path, jnp.dtype("float32"), canvas)
    options = {"families": ("fill",), "limit": 2, "max_new_tokens": 8, "batch_size": 2}
    found = evaluate(model, compare=("decode=entropy_renoise:steps=3",), **options)
    assert [row.decoder for row in found.rows] == ["decode=entropy_renoise", "decode=entropy_renoise:steps=3"]
    assert [row.steps_per_answer for row in found.rows] == [2, 3]


def test_it_can_be_planned(folder):
    """Shapes alone: a step of every layer, since they are of two kinds."""
    model = models.abstract(folder, "bfloat16", make_mesh("data=1,model=1", jax.devices()[:1]))
    setup = planned.prepare(model, Diffusion(), make_mesh("data=1,model=1", jax.devices()[:1]), batch=2, context=64)
    assert setup.decoder.block_length == W and setup.state.cache.key[0].shape == (2, 2, 64, 8)
    sizes = planned.sizes(setup)
    assert sizes.weights == sum(2 * leaf.size for leaf in jax.tree.leaves(model.params)) and sizes.cache > 0
    first = loading.with_layers(model, 1)
    assert first.lm.num_layers == 1 and first.lm.config.window(0) == 5 and model.lm.config.window(1) is None
