"""Soft thinking: against plain decoding where nothing is soft, and against numpy and whole passes where it is."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import MIXED, params, same, start, texts
from support.mesh_cases import SMALLER as TARGET
from support.mesh_cases import begun, checked, placed, run

import specjax
from specjax import cli
from specjax import decoder as decoding
from specjax.decode import SoftThinking
from specjax.decoder import Needs
from specjax.lm import Block, Wants
from specjax.models.guided import Guided
from specjax.sampling import SamplingArrays, row_keys
from specjax.sampling.noise import gumbel
from specjax.sampling.sampler import Sampler
from specjax.serve.engine import Engine
from specjax.sharding import make_mesh, shardings
from specjax.soft import Dirichlet, GumbelSoftmax, Mean, soft_thinking
from specjax.state import Finish

ROWS = dataclasses.replace(MIXED, new_tokens=12)
WARM = dataclasses.replace(ROWS, options=({"temperature": 1.0},) * 8)
GREEDY = dataclasses.replace(ROWS, options=({},) * 8)
WHOLE = params("none")["target"]
MODEL = {"target": {**WHOLE, "layers": {0: WHOLE["layers"][0]}}, "draft": None}
HOT = [row for row, options in enumerate(ROWS.options) if options["temperature"]]


@functools.cache
def plain(rows):
    decoder = specjax.speculative(TARGET)
    return texts(decoding.run(decoder, MODEL, start(decoder, rows, model=MODEL)))


def soft(mixer=None, rows=ROWS, *, model=MODEL, **options):
    """The final state."""
    decoder = soft_thinking(TARGET, mixer, **options)
    return decoding.run(decoder, model, start(decoder, rows, model=model))


@dataclasses.dataclass(frozen=True)
class Late(GumbelSoftmax):
    """A fault: the noise of the place after."""

    def mix(self, logits, sampler):
        return super().mix(logits, dataclasses.replace(sampler, length=sampler.length + 1))


@pytest.mark.slow
def test_without_softness_it_is_plain_decoding():
    """Every warper in use: with `tau` next to 0. With the noise of another place it is not."""
    same(texts(soft(GumbelSoftmax(tau=1e-6))), plain(ROWS))
    late = texts(soft(Late(tau=1e-6)))
    assert all(late[row] != plain(ROWS)[row] for row in HOT)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", (GumbelSoftmax(tau=0.0), GumbelSoftmax(n=1)), ids=("tau", "n"))
def test_nor_with_one_token(mixer):
    same(texts(soft(mixer)), plain(ROWS))


LATER = [pytest.param(mixer, marks=pytest.mark.slow) for mixer in (Dirichlet(), Mean())]


@pytest.mark.parametrize("mixer", (GumbelSoftmax(), *LATER), ids=lambda mixer: type(mixer).__name__)
def test_greedy_rows_do_not_think(mixer):
    """Beside others that do, whose texts are others than plain decoding's."""
    got, wanted = texts(soft(mixer)), plain(ROWS)
    differ = [row for row in range(8) if got[row] != wanted[row]]
    assert set(differ) <= set(HOT) and len(differ) > 3


@pytest.mark.slow
def test_a_greedy_job_mixes_nothing():
    decoder = soft_thinking(TARGET).fitted(Needs(greedy=True))
    same(texts(decoding.run(decoder, MODEL, start(decoder, GREEDY, model=MODEL))), plain(GREEDY))


@pytest.mark.slow
def test_the_mean_of_one_token_is_greedy_decoding():
    same(texts(soft(Mean(n=1), WARM)), plain(GREEDY))


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def test_against_numpy_and_whole_passes():
    """Rows with a temperature and top-k, step by step: ids, weights and the token; what was read before is read anew, in one
    pass without a cache, as vectors."""
    rows, mixer = dataclasses.replace(ROWS, options=({"temperature": 1.3, "top_k": 6},) * 8), GumbelSoftmax()
    decoder = soft_thinking(TARGET, mixer)
    state, own, steps = start(decoder, rows, model=MODEL), MODEL["target"], 5
    table, seen, whole, heaviest = np.asarray(own["embed"]["embedding"]), [], jax.jit(seen_whole), []
    for _ in range(steps):
        state = decoding.run(decoder, MODEL, state, 1)
        seen.append(jax.device_get((state.ids, state.weights)))
    tokens, begin = np.asarray(state.tokens), np.asarray(state.prompt_length)
    for row in (1, 5):
        inputs = list(table[list(rows.prompts[row])])
        for step in range(steps):
            place = len(inputs)
            vectors = np.pad(np.asarray(inputs), ((0, 24 - place), (0, 0)))
            scores = np.asarray(whole(own, vectors))[place - 1] / 1.3
            scores[scores < np.sort(scores)[-6]] = -np.inf
            scores = scores + np.asarray(gumbel(state.key[row : row + 1], jnp.asarray([[place]]), 96))[0, 0]
            ids = np.argsort(-scores)[:6]
            weights = softmax(scores[ids] / 0.5)
            assert seen[step][0][row][:6].tolist() == ids.tolist() and not seen[step][1][row][6:].any()
            np.testing.assert_allclose(seen[step][1][row][:6], weights, atol=1e-4)
            assert tokens[row, begin[row] + step] == ids[0]
            heaviest.append(weights[0])
            inputs.append(weights @ table[ids])
    assert np.mean(heaviest) < 0.9


def seen_whole(own, vectors):
    """Logits `[T, V]` of one text, given as vectors `[T, E]`."""
    size = vectors.shape[0]
    at, zero = jnp.arange(size)[None], jnp.zeros((1,), jnp.int32)
    block = Block(jnp.zeros_like(at), at, zero, None, vectors[None], jnp.ones((1, size), bool))
    return TARGET(own, block, None, wants=Wants(logits=True)).logits[0]


def moments(mixer, dist):
    """Means and variances of the weights by token over many rows that differ in their noise alone."""
    count = 4096
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(dist)), (count, 1, len(dist)))
    zeros = jnp.zeros((count,), jnp.int32)
    sampler = Sampler(
        row_keys(0, map(str, range(count))), zeros[:, None], zeros, zeros == 0, SamplingArrays.make(count, 1.0)
    )
    mixed = jax.jit(mixer.mix)(logits, sampler)
    weights = np.zeros((count, len(dist)))
    np.put_along_axis(weights, np.asarray(mixed.ids), np.asarray(mixed.weights), axis=1)
    assert (np.argmax(weights, axis=1) == np.asarray(mixed.token)).all()
    return weights.mean(axis=0), weights.var(axis=0)


def test_weights_have_their_distributions():
    """With p renormalised over the n likeliest, the mean's are p, and Dirichlet's have the mean p and the variance
    p (1 - p) / (alpha + 1)."""
    dist, near = [0.4, 0.05, 0.3, 0.1, 0.15], [0, 2, 3, 4]
    p = np.asarray([0.4, 0.3, 0.1, 0.15]) / 0.95
    for alpha in (1.0, 6.0):
        mean, variance = moments(Dirichlet(n=4, alpha=alpha), dist)
        np.testing.assert_allclose(mean[near], p, atol=0.02)
        np.testing.assert_allclose(variance[near], p * (1 - p) / (alpha + 1), rtol=0.12)
        assert mean[1] == 0
    np.testing.assert_allclose(moments(Mean(n=4), dist)[0][near], p, rtol=1e-5)
    first = np.bincount(np.argmax(np.log(dist) + np.random.default_rng(0).gumbel(size=(4096, 5)), axis=1)) / 4096
    np.testing.assert_allclose(moments(GumbelSoftmax(n=5, tau=0.0), dist)[0], first, atol=0.03)


@pytest.mark.slow
def test_it_ends_at_a_token_and_goes_on_plainly():
    """One that is written first, after the prompt, leaves nothing soft; a later one leaves what follows to plain
    decoding."""
    wanted = plain(WARM)
    state = soft(end_of_think=wanted[1][0], rows=WARM)
    assert not state.thinks[1] and texts(state)[1] == wanted[1]
    got = texts(soft(rows=WARM))[1]
    end = next(token for token in got[2:] if token not in got[:2])
    ended = texts(soft(end_of_think=end, rows=WARM))[1]
    at = got.index(end) + 1
    assert ended[:at] == got[:at] and ended[at:] != got[at:]


def test_a_cold_stop_writes_the_token():
    """After so many sure tokens, whatever would have come; then it is plain decoding after that token."""
    end = 17
    state = soft(GumbelSoftmax(cold_stop=99.0, cold_steps=1), WARM, end_of_think=end)
    assert all(text[0] == end for text in texts(state)) and not state.thinks.any()
    behind = dataclasses.replace(WARM, prompts=tuple((*p, end) for p in WARM.prompts), new_tokens=11)
    same([text[1:] for text in texts(state)], plain(behind))


@pytest.mark.slow
def test_other_cold_stops():
    end = 17
    late = soft(GumbelSoftmax(cold_stop=99.0, cold_steps=4), WARM, end_of_think=end)
    assert all(text[3] == end for text in texts(late)) and texts(late)[1][:3] == texts(soft(rows=WARM))[1][:3]
    never = soft(GumbelSoftmax(cold_stop=1e-6, cold_steps=1), WARM, end_of_think=end)
    same(texts(never), texts(soft(rows=WARM, end_of_think=end)))
    silent = soft(GumbelSoftmax(cold_stop=99.0, cold_steps=1), WARM)  # no token is named: none is written
    same(texts(silent), plain(WARM))


@pytest.mark.slow
def test_rows_are_their_own_and_nothing_is_traced_twice():
    """Whatever stands beside a row, and whichever slot it enters when; more mixers, ends and temperatures in one process."""
    prompts = [list(prompt) for prompt in MIXED.prompts[:5]]
    options = {"temperature": 1.0, "max_new_tokens": 9, "decode": "gumbel:n=4", "progress": False}
    model = TARGET, MODEL["target"]
    wanted = [specjax.generate(model, [prompt], batch_size=1, **options)[0].tokens for prompt in prompts]
    engine = Engine(model, decode=SoftThinking("gumbel:n=4"))
    asked = lambda heat: [engine.request(prompt, temperature=heat, max_new_tokens=9) for prompt in prompts]
    assert [record.tokens for record in engine.run(asked(1.0), batch_size=2)] == wanted
    compiled = decoding.run_program._cache_size(), decoding.insert_program._cache_size()
    again = [record.tokens for record in engine.run(asked(0.6), batch_size=2)]
    assert (decoding.run_program._cache_size(), decoding.insert_program._cache_size()) == compiled
    assert again != wanted


def test_what_is_no_number_fails_its_row():
    own = MODEL["target"]
    spoilt = {**MODEL, "target": {**own, "norm": {"scale": own["norm"]["scale"].at[0].set(jnp.nan)}}}
    state = soft(model=spoilt)
    assert state.finish.tolist() == [Finish.ERROR] * 8 and not any(texts(state))


@pytest.mark.slow
def test_a_mesh_changes_nothing_and_moves_no_weights():
    """In the first twelve tokens. Mixtures carry rounding on: noise of 1e-7 in the parameters changes two rows' last tokens."""
    first = lambda rows: [row[:12] for row in rows]
    decoder = soft_thinking(TARGET, GumbelSoftmax(n=4), mesh=make_mesh("data=2,model=4"))
    model = placed(decoder, MODEL)
    host = begun(decoder, model)
    state = dataclasses.replace(host, key=jax.random.wrap_key_data(host.key, impl="threefry2x32"))
    state = jax.device_put(state, shardings(decoder.mesh, decoder.axes(state), state))
    got = texts(checked(lambda params, state: run(decoder, params, state), model, state)(model, state))
    alone = soft_thinking(TARGET, GumbelSoftmax(n=4))
    state = jax.device_get(begun(alone, MODEL))
    state = dataclasses.replace(state, key=jax.random.wrap_key_data(state.key, impl="threefry2x32"))
    wanted = texts(jax.jit(lambda params, state: run(alone, params, state))(MODEL, state))
    assert min(map(len, wanted)) >= 12
    same(first(got), first(wanted))


@pytest.mark.slow
def test_a_target_of_two_passes():
    """Under guidance both passes read the mixture, of which one token is left; the other text begins with another one."""
    target = Guided(TARGET, 1.5, (3, 8))
    text = lambda decoder: texts(decoding.run(decoder, MODEL, start(decoder, WARM, model=MODEL)))
    wanted = text(specjax.speculative(target))
    same(text(soft_thinking(target, GumbelSoftmax(tau=1e-6))), wanted)
    assert wanted != plain(WARM)


@pytest.mark.slow
def test_completions_of_a_prompt_and_log_probabilities():
    """The later ones begin as copies of the first one's row."""
    options = {"temperature": 1.0, "max_new_tokens": 9, "num_return_sequences": 2, "logprobs": True, "progress": False}
    ask = lambda **more: specjax.generate((TARGET, MODEL["target"]), [list(MIXED.prompts[2])], **options, **more)
    got, wanted = ask(decode=SoftThinking(GumbelSoftmax(tau=1e-6))), ask(drafter="none")
    assert [r.tokens for r in got] == [r.tokens for r in wanted] and got[0].tokens != got[1].tokens
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine.warped_logprobs, theirs.warped_logprobs, atol=1e-5)


@pytest.mark.slow
def test_the_command_line_goes_on_where_it_was(tmp_path, capsys):
    """Lines with options of their own; records are those of `generate`, and another mixer is another job."""
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "Once upon", "temperature": 1.2},
        {"prompt": "The red", "seed": 4},
        {"prompt": "A", "temperature": 0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["generate", "--model", "tiny", "--input", str(path), "--output", str(out), "--temperature", "0.9"]
    words += ["--max-new-tokens", "8", "--batch-size", "2", "--decode", "gumbel:n=4,tau=0.8"]
    assert cli.main(words) == 1  # one of them
    whole = out.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in whole]
    options = {"decode": SoftThinking(GumbelSoftmax(n=4, tau=0.8)), "temperature": 0.9, "max_new_tokens": 8}
    wanted = specjax.generate("tiny", lines[:2], progress=False, **options)
    assert [record["tokens"] for record in records[:2]] == [record.tokens for record in wanted]
    assert "set a temperature, or decode otherwise" in records[2]["error"]
    assert "soft thinking, 1.00 tokens per step" in capsys.readouterr().err
    out.write_text(whole[0])
    assert cli.main(words) == 1 and out.read_text() == "".join(whole)
    assert cli.main([*words[:-1], "mean"]) == 2 and "decode" in capsys.readouterr().err


REFUSED = (
    ({"decode": "gumbel"}, "set a temperature, or decode otherwise"),
    ({"decode": "gumbel", "drafter": "prompt_lookup"}, "leave drafter out"),
    ({"decode": "gumbel:verifier=rejection"}, "mixer of soft thinking 'gumbel' has no field 'verifier'"),
    ({"decode": "gumbel:num_beams=2"}, "mixer of soft thinking 'gumbel' has no field 'num_beams'"),
    ({"decode": "soft_thinking:mixer=soft"}, "unknown mixer of soft thinking 'soft'; choose gumbel, dirichlet, mean"),
    ({"decode": "gumbel:alpha=1"}, "alpha"),
    ({"decode": "gumbel:n=0"}, "n and cold_steps to be whole numbers from 1 on, got 0 and 256"),
    ({"decode": "gumbel:tau=-1"}, "tau must be a finite number >= 0, got -1"),
    ({"decode": "dirichlet:alpha=0"}, "alpha must be a finite number above 0"),
    ({"decode": "mean:cold_stop=-1"}, "cold_stop must be a finite number of nats >= 0"),
    ({"decode": "mean:end_of_think=two words here"}, "end_of_think must be one token, and 'two words here' is"),
    ({"decode": "mean:end_of_think=1000000"}, "end_of_think 1000000 is outside the vocabulary"),
    ({"end_of_think": 3}, "it is in decode here, such as gumbel:end_of_think="),
    ({"model": "tiny-diffusion", "decode": "mean"}, "a diffusion model, and soft thinking needs an autoregressive one"),
)


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=lambda case: str(case)[:60])
def test_what_it_does_not_go_with(options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        specjax.generate(**{"model": "tiny", "prompts": ["a"], **options})


def test_mixers_are_listed(capsys):
    assert cli.main(["samplers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("--decode, what is read in a token's place while a row thinks (soft thinking)")
    assert [line.split()[0] for line in lines[at + 1 :: 2]] == ["gumbel", "dirichlet", "mean"]
    assert lines[at + 2].strip() == "gumbel:n=8,cold_stop=0.0,cold_steps=256,tau=0.5"
