"""Running decoders: streams, insertion, stopping, log-probabilities, and what plain decoding lowers to."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import (
    CAPACITY,
    DRAFT,
    DRAFTERS,
    MIXED,
    TARGET,
    Rows,
    but_slow,
    complete,
    params,
    plain,
    same,
    start,
    texts,
)
from support.shapes import changed

import specjax
from specjax import decoder as decoding
from specjax.decoder import Needs
from specjax.draft import Drafter, Extra, ModelDrafter, NoDrafter, PromptLookup, Proposal
from specjax.expand import TopK
from specjax.lm import Block, Partial, Wants
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.state import Finish
from specjax.tree import Topology, Tree


@pytest.fixture(scope="module")
def decoder():
    return specjax.speculative(TARGET, DRAFTERS["draft-chain"])


@pytest.mark.slow
def test_import_is_light():
    code = "import specjax, sys; print([m for m in ('flax', 'transformers', 'torch', 'optax', 'orbax') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_fitted_decoder_has_less_to_compile_and_the_same_text():
    """Of a greedy and brief job: the target once, and neither noise nor a sort."""
    whole = specjax.speculative(TARGET, DRAFTERS["prompt_lookup"])
    fitted, rows = whole.fitted(Needs(greedy=True, brief=True)), dataclasses.replace(MIXED.pick(0, 3), options=({}, {}))
    programs = [str(jax.make_jaxpr(each.step)(params(), start(each, rows))) for each in (whole, fitted)]
    reads = [program.count("tree_attention[") for program in programs]
    assert reads[0] == len(whole.drafter.rungs) * reads[1] and len(whole.drafter.rungs) > 1
    assert all("threefry" in program or "random_fold_in" in program for program in programs[:1])
    assert not any(word in programs[1] for word in ("threefry", "random_fold_in", "sort["))
    same(texts(decoding.run(fitted, params(), start(fitted, rows))), complete(DRAFTERS["prompt_lookup"], rows)[0])
    assert whole.fitted(Needs()) == whole == specjax.speculative(TARGET, DRAFTERS["prompt_lookup"])


@pytest.mark.slow
def test_stream_brings_the_same_tokens(decoder):
    got = [[] for _ in MIXED.prompts]
    calls = 0
    for progress in specjax.stream(decoder, params(), start(decoder, MIXED), steps_per_call=3):
        calls += 1
        for row, news in enumerate(progress.tokens):
            got[row] += news
    same(got, plain())
    assert calls > 3
    assert all(f == Finish.LENGTH for f in progress.finish)


@pytest.mark.slow
def test_step_equals_run(decoder):
    """`step`, jitted on its own, walks the same path, reports what it did, and takes the state's buffers."""
    state = start(decoder, MIXED)
    got = [[] for _ in MIXED.prompts]
    while not bool(state.done.all()):
        before = state
        state, info = decoding.step(decoder, params(), state)
        assert before.tokens.is_deleted()
        for row, (new, count) in enumerate(
            zip(np.asarray(info.verdict.emitted), np.asarray(info.verdict.committed), strict=True)
        ):
            got[row] += new[:count].tolist()
    same(got, plain())


@pytest.mark.parametrize(
    "name", but_slow(["none", "token_recycling", "draft-top_k", "fuse"], "token_recycling", "fuse")
)
def test_insert_into_finished_rows(name):
    """Rows refilled half way give what they give in a fresh batch, and their neighbours go on undisturbed."""
    decoder = specjax.speculative(TARGET, DRAFTERS[name])
    state = start(decoder, MIXED)
    state = dataclasses.replace(state, limit=jnp.where(jnp.arange(8) % 2 == 0, state.length + 5, state.limit))
    state = decoding.run(decoder, params(name), state, 6)
    state = dataclasses.replace(state, limit=state.limit)
    assert bool(state.done[::2].all()) and not bool(state.done.all())
    again = MIXED.pick(1, 3, 5, 7)  # the odd rows' prompts once more, now in the even rows
    fresh = start(specjax.speculative(TARGET), again)  # what every drafter is asked for alike
    size = max(len(p) for p in again.prompts)
    prompts = Prompts(
        fresh.tokens[:, :size], fresh.length, row_keys(0, again.names), fresh.limit, fresh.sampling, fresh.eos, 16
    )
    state = decoding.insert(decoder, params(name), state, jnp.asarray([0, 2, 4, 6]), prompts)
    got = texts(decoding.run(decoder, params(name), state))
    same(got, [plain()[i] for i in (1, 1, 3, 3, 5, 5, 7, 7)])


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 64])
def test_prefill_chunks_that_do_not_divide_the_buffer(width):
    """Prompts of 40 tokens in a buffer of 60: the last chunk is cut, and the text is that of one wide pass without drafts."""
    long = Rows(tuple(tuple((7 * i + 3 * j) % 96 for j in range(40 - i)) for i in range(2)), ("a", "b"), ({}, {}), 8)
    decoder, alone = specjax.speculative(TARGET, DRAFTERS["draft-chain"]), specjax.speculative(TARGET)
    wide = texts(decoding.run(alone, params(), start(alone, long, model=params(), width=64)))
    got = texts(decoding.run(decoder, params(), start(decoder, long, capacity=60, width=width)))
    same(got, wide)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("none", "draft-top_k"))
def test_eos_cuts_the_accepted_path(name):
    """Two EOS ids taken from the middle of plain text end the rows there, EOS included."""
    eos = (plain()[1][9], plain()[4][6])
    got, state = complete(DRAFTERS[name], MIXED, eos=eos)
    for row, whole in enumerate(plain()):
        ends = [i for i, t in enumerate(whole) if t in eos]
        assert got[row] == (whole[: ends[0] + 1] if ends else whole)
        assert int(state.finish[row]) == (Finish.EOS if ends else Finish.LENGTH)


@pytest.mark.slow
def test_limits_are_exact():
    short = dataclasses.replace(MIXED, new_tokens=1)
    got, state = complete(DRAFTERS["draft-chain"], short)
    same(got, [row[:1] for row in plain()])
    assert (np.asarray(state.finish) == Finish.LENGTH).all()


def with_logprobs(drafter):
    decoder = specjax.speculative(TARGET, drafter, logprobs=True)
    return decoding.run(decoder, params(), start(decoder, MIXED))


@pytest.fixture(scope="module")
def reference():
    """Plain decoding with log-probabilities."""
    return with_logprobs(NoDrafter())


@pytest.mark.slow
@pytest.mark.parametrize("name", but_slow(["prompt_lookup", "draft-top_k"], "draft-top_k"))
def test_logprobs_equal_plain(name, reference):
    """Raw and warped log-probabilities of the text do not depend on how it was found."""
    ours = with_logprobs(DRAFTERS[name])
    same(texts(ours), texts(reference))
    for row, (begin, end) in enumerate(zip(reference.prompt_length, reference.length, strict=True)):
        span = slice(int(begin), int(end))
        for kind in ("raw", "warped"):
            a, b = (np.asarray(getattr(s.logprobs, kind)[row, span]) for s in (ours, reference))
            np.testing.assert_allclose(a, b, atol=2e-4)
    raw, warped = (np.asarray(getattr(reference.logprobs, k)[4]) for k in ("raw", "warped"))
    np.testing.assert_allclose(raw, warped, atol=1e-5)  # row 4: temperature 1, no filter
    assert not np.allclose(np.asarray(reference.logprobs.raw[2]), np.asarray(reference.logprobs.warped[2]), atol=1e-3)


@pytest.mark.slow
def test_logprobs_equal_a_fresh_pass(reference):
    state, row = reference, 1
    begin, end = int(state.prompt_length[row]), int(state.length[row])
    tokens = state.tokens[row : row + 1, :end]
    block = Block(tokens, jnp.arange(end)[None], jnp.zeros((1,), jnp.int32))
    logits = jax.jit(lambda target: TARGET(target, block, None, wants=Wants(logits=True)).logits[0])(params()["target"])
    dist = jax.nn.log_softmax(logits, axis=-1)
    wanted = [float(dist[t - 1, int(tokens[0, t])]) for t in range(begin, end)]
    np.testing.assert_allclose(np.asarray(state.logprobs.raw[row, begin:end]), wanted, atol=2e-4)


def test_bad_logits_stop_their_row_alone(decoder):
    """A row whose cache turns NaN reports an error; the others do not notice."""
    state = start(decoder, MIXED)
    spoil = lambda x: x.at[3].set(jnp.nan)
    state = dataclasses.replace(state, cache=jax.tree.map(spoil, state.cache))
    done = decoding.run(decoder, params(), state)
    assert int(done.finish[3]) == Finish.ERROR
    got = texts(done)
    same(got[:3] + got[4:], plain()[:3] + plain()[4:])


@pytest.mark.slow
def test_plain_decoding_has_no_tree_in_it():
    """Off is off: with N = 1 the step has no tree masks, no per-depth noise and no path gathers."""
    decoder = specjax.speculative(TARGET, None)
    state = start(decoder, MIXED)
    jaxpr = jax.make_jaxpr(decoder.step)(params(), state)
    scopes = lambda scope: [e for e in jaxpr.eqns if scope in str(e.source_info.name_stack)]
    assert len(scopes("verify")) <= 3  # a constant path and a reshape of the draw
    text = str(jaxpr)
    assert "gather" not in "".join(str(e) for e in scopes("verify"))
    assert "log_q" not in text
    chain = specjax.speculative(TARGET, PromptLookup(length=1))
    bigger = jax.make_jaxpr(chain.step)(params(), start(chain, MIXED))
    assert len(text) < len(str(bigger))


def test_drafter_and_target_must_share_a_vocabulary():
    other = ModelDrafter(type(DRAFT)(changed(DRAFT.config, vocab_size=64)))
    with pytest.raises(ValueError, match="must share one vocabulary"):
        specjax.speculative(TARGET, other)


def test_init_refuses_what_does_not_fit(decoder):
    with pytest.raises(ValueError, match="capacity"):
        decoder.init(params(), Prompts.of([[1] * 4], 40), capacity=32)


def test_expanders_must_fit_the_vocabulary():
    with pytest.raises(ValueError, match="candidates per node"):
        specjax.speculative(TARGET, ModelDrafter(DRAFT, TopK(k=97, depth=1, nodes=4)))


@pytest.mark.parametrize(
    "options",
    ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2.0}, {"top_k": -1}, {"temperature": "hot"}),
)
def test_sampling_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SamplingArrays.make(2, **options)


@dataclasses.dataclass(frozen=True)
class WithExtra(Drafter):
    """Prompt lookup with two junk slots beside the tree, one of them an embedding: they must change nothing."""

    inner: PromptLookup = PromptLookup(length=3, min_ngram=1)
    nodes = 4
    depth = 3

    def propose(self, params, draft, view, sampler):
        proposal = self.inner.propose(params, draft, view, sampler)
        batch = view.length.shape[0]
        extra = Extra(
            tokens=jnp.full((batch, 2), 5, jnp.int32),
            positions=view.length[:, None] + jnp.arange(2)[None],
            visible=jnp.ones((batch, 2, 6), bool),
            embeddings=jnp.full((batch, 2, TARGET.config.hidden_size), 3.0),
        )
        return dataclasses.replace(proposal, extra=extra)


@dataclasses.dataclass(frozen=True)
class EarlyExit(Drafter):
    """Drafts with the target's first layer and hands over what it computed: a partial stack."""

    length: int = 2

    @property
    def nodes(self):
        return self.length + 1

    @property
    def depth(self):
        return self.length

    def propose(self, params, draft, view, sampler):
        target = params["target"]
        tokens, h_all, past = [view.root], [], None
        for depth in range(self.length + 1):
            position = view.length[:, None] - 1 + depth
            block = Block(tokens[-1][:, None], position, view.length - 1)
            h, delta = TARGET.layers(target, TARGET.embed(target, block.tokens), 0, 1, block, view.cache, past)
            h_all.append(h)
            past = delta if past is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), past, delta)
            logits = TARGET.unembed(target, TARGET.norm(target, h))
            if depth < self.length:
                tokens.append(sampler.draw(logits, depth)[:, 0])
        nodes = jnp.stack(tokens, axis=1)
        tree = Tree.of(Topology.chain(self.length), nodes, jnp.ones(nodes.shape, bool))
        return Proposal(tree, draft, partial=Partial(jnp.concatenate(h_all, axis=1), past, 1))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", (WithExtra(), EarlyExit()), ids=lambda d: type(d).__name__)
def test_extra_slots_and_partial_stacks_keep_the_text(drafter):
    got, state = complete(drafter)
    same(got, plain())
    assert int(state.stats.accepted[:, 1:].sum()) > 0


def test_capacity_of_the_harness_is_enough():
    longest = max(len(p) for p in MIXED.prompts) + MIXED.new_tokens
    assert longest + max(d.depth for d in DRAFTERS.values()) + 1 <= CAPACITY
