"""Two models that take turns: either of them alone at the ends of the threshold, and a slow oracle between them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFT, MIXED, TARGET, params, plain, start, texts
from support.margin import teacher_forced
from support.shapes import changed

import specjax
from specjax import cli
from specjax import decoder as decoding
from specjax.models.llama import LlamaLM
from specjax.search import EntropyAdaptive, EntropyAdaptiveDecoder
from specjax.sharding import make_mesh

LARGE = params("none")["target"]
# other weights than the large model's lower layers, so that texts differ
SMALL = jax.tree.map(lambda x: x * 2.0 if x.ndim == 2 else x, DRAFT.init(jax.random.key(11)))
MODEL = {"target": LARGE, "small": SMALL}
BETWEEN = 2.2
DECODER = EntropyAdaptiveDecoder(TARGET, DRAFT, EntropyAdaptive(threshold=BETWEEN, window=3, least=2, block=4))
BATCH = dataclasses.replace(MIXED, new_tokens=24)


def filled(thresholds, decoder=DECODER, rows=BATCH, eos=()):
    """Rows with thresholds of their own."""
    state = start(decoder, rows, model=MODEL, eos=eos, capacity=96)
    given = jnp.broadcast_to(jnp.asarray(thresholds, jnp.float32), (len(rows.prompts),))
    return dataclasses.replace(state, threshold=given + 0, on_large=given <= 0)


def run(thresholds, decoder=DECODER, **more):
    return decoding.run(decoder, MODEL, filled(thresholds, decoder, **more))


@pytest.fixture(scope="module")
def alone():
    """Texts of the large model and of the small one."""
    small = specjax.speculative(DRAFT)
    model = {"target": SMALL, "draft": None}
    return plain(BATCH), texts(decoding.run(small, model, start(small, BATCH, model=model)))


@pytest.mark.slow
def test_at_the_ends_of_the_threshold_it_is_one_model(alone):
    """Greedy rows and sampled ones with warpers, side by side with rows of the other end."""
    assert alone[0] != alone[1]
    for side, threshold in ((0, 0.0), (1, np.inf)):
        state = run(threshold)
        assert texts(state) == alone[side]
        used, idle = (state.large, state.small) if side == 0 else (state.small, state.large)
        assert np.array_equal(used.passes, state.stats.steps) and not np.any(np.asarray(idle.passes))
    both = np.where(np.arange(8) % 2, np.inf, 0.0)
    assert texts(run(both)) == [alone[i % 2][i] for i in range(8)]


@pytest.mark.slow
def test_rows_do_not_depend_on_each_other(alone):
    """A row between the models writes the same beside rows that never change and beside rows that do."""
    between = run(BETWEEN)
    beside = np.where(np.arange(8) % 2, BETWEEN, np.where(np.arange(8) % 4, 0.0, np.inf))
    assert texts(run(beside))[1::2] == texts(between)[1::2]
    count = decoding.run_program._cache_size()
    run(0.1)
    assert decoding.run_program._cache_size() == count  # the threshold is no part of the program


def oracle(prompt, new_tokens):
    """Greedy text and who wrote it, with whole passes of both models for every token."""
    text, recent, large, since, who = list(prompt), [], False, 0, []
    for _ in range(new_tokens):
        lm, own = (TARGET, LARGE) if large else (DRAFT, SMALL)
        logits = np.asarray(teacher_forced(lm, own, [*text, 0]), np.float64)[len(text) - 1]
        dist = np.exp(logits - logits.max())
        dist /= dist.sum()
        text.append(int(np.argmax(logits)))
        who.append(large)
        recent = [*recent, -np.sum(dist * np.log(dist))][-DECODER.how.window :]
        since += 1
        if (np.mean(recent) >= BETWEEN) != large and since >= DECODER.how.least:
            large, since = not large, 0
    return text[len(prompt) :], who


@dataclasses.dataclass(frozen=True)
class Forgetful(EntropyAdaptiveDecoder):
    """A fault: the model whose turn comes does not read what the other wrote."""

    def step(self, params, state):
        known = state.length - 1
        memory = lambda own: dataclasses.replace(own, known=known)
        return super().step(params, dataclasses.replace(state, large=memory(state.large), small=memory(state.small)))


def test_between_them_it_is_the_oracle():
    greedy = dataclasses.replace(BATCH, options=({"temperature": 0.0},) * 8)
    wanted = [oracle(greedy.prompts[row], 16) for row in (1, 3)]
    assert all(0 < sum(who) < 16 for _, who in wanted)
    for decoder, same in ((DECODER, True), (Forgetful(**vars(DECODER)), False)):
        state = run(BETWEEN, decoder, rows=greedy)
        got = []
        for row in (1, 3):
            begin = int(state.prompt_length[row])
            span = slice(begin, begin + 16)
            got.append((np.asarray(state.tokens)[row, span].tolist(), np.asarray(state.by_large)[row, span].tolist()))
        assert (got == wanted) is same


def test_passes_are_tokens_and_what_was_missed():
    """A model's passes are the tokens that it wrote, and a block for every `block` tokens that it missed."""
    state = run(BETWEEN)
    for row in range(8):
        begin, end = int(state.prompt_length[row]), int(state.length[row])
        who = np.asarray(state.by_large)[row, begin:end]
        for memory, mine in ((state.large, who), (state.small, ~who)):
            passes, missed = 0, 0
            for wrote in mine:
                passes += (1 + missed // DECODER.how.block) if wrote else 0
                missed = 0 if wrote else missed + 1
            assert int(memory.passes[row]) == passes


@pytest.mark.slow
def test_on_a_mesh_it_is_the_same():
    mesh = make_mesh("data=2,model=4")
    decoder = dataclasses.replace(DECODER, mesh=mesh)
    weights = jax.device_put(MODEL, decoder.param_shardings(MODEL))
    state = decoding.run(decoder, weights, start(decoder, BATCH, model=weights))
    one = run(BETWEEN)
    assert texts(state) == texts(one) and np.array_equal(state.by_large, one.by_large)


def test_a_row_ends_with_eos():
    free = texts(run(0.0))
    eos = free[0][5]
    state = run(0.0, eos=(eos,))
    assert texts(state)[0] == free[0][: free[0].index(eos) + 1]
    assert int(state.finish[0]) == specjax.Finish.EOS


REFUSED = (
    ({"threshold": -1.0}, "an entropy of 0 nats or more, got -1.0"),
    ({"threshold": float("nan")}, "an entropy of 0 nats or more"),
    ({"block": 0}, "block must be at least 1, got 0"),
)


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=str)
def test_what_it_does_not_take(options, said):
    with pytest.raises(ValueError, match=said):
        EntropyAdaptive(**options)
    with pytest.raises(ValueError, match="the large one has 96 tokens, the small one 97"):
        EntropyAdaptiveDecoder(TARGET, LlamaLM(changed(DRAFT.config, vocab_size=97)))


def test_it_is_listed(capsys):
    assert cli.main(["searches"]) == 0
    assert "\nentropy_adaptive" in capsys.readouterr().out


@pytest.mark.slow
def test_the_shipped_models_take_turns():
    """On a question: the ends are what `generate` writes with either model, and between them both write."""
    from specjax import models
    from specjax.prompts import Prompts
    from specjax.sampling import row_keys

    large, small = (models.load(name, dtype="float32") for name in ("tiny", "tiny-draft"))
    said = "A counter shows 24. Subtract 17. Add 9. What does the counter show? Work it out, then say the answer."
    question = [{"role": "user", "content": said}]
    prompt = large.tokenizer.encode(
        large.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False),
        add_special_tokens=False,
    )
    decoder = EntropyAdaptiveDecoder(large.lm, small.lm, EntropyAdaptive(threshold=0.2))
    weights = {"target": large.params, "small": small.params}
    prompts = Prompts.of([prompt] * 3, 64, keys=row_keys([0] * 3, ["a", "b", "c"]), eos=large.eos_ids)
    state = decoder.init(weights, prompts, capacity=192)
    given = jnp.asarray([0.0, np.inf, 0.2], jnp.float32)
    state = decoding.run(decoder, weights, dataclasses.replace(state, threshold=given, on_large=given <= 0))
    got = texts(state)
    for model, own in ((large, got[0]), (small, got[1])):
        assert specjax.generate(model, [question], drafter="none", max_new_tokens=64)[0].tokens == own
    who = np.asarray(state.by_large)[2, len(prompt) : int(state.length[2])]
    assert 0 < who.sum() < len(who)
