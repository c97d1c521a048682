"""One life of a row: every decoder keeps the protocol, begins blank with buffers of its own, and ends for the same reasons."""

import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_diffusion
from support.conformance import DRAFTERS, TARGET, params, params_of

import specjax
from specjax import decoder as decoding
from specjax import diffusion
from specjax.diffusion import free_dave, guided, wino
from specjax.draft import Drafter, Verdict
from specjax.models.diffusion_gemma import DiffusionGemmaLM
from specjax.models.gemma_config import DiffusionGemmaConfig, Heads
from specjax.models.joint import JointDistribution
from specjax.prompts import OPEN, Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.search import (
    Asap,
    AsapSearch,
    Beam,
    BeamSearch,
    EntropyAdaptiveDecoder,
    Smc,
    SmcSearch,
    StochasticBeam,
    StochasticBeamSearch,
    Superposed,
    SuperposedSearch,
)
from specjax.soft import soft_thinking
from specjax.speculative import commit_counts
from specjax.state import DecodeState, Finish, finish_rows

EOS, WIDTH = 5, 4
LM, MASK = small_diffusion.LM, small_diffusion.MASK
GUIDE = guided.Guided(LM)
HEADS = Heads(8, 2, 1e4, 4)
CANVAS = DiffusionGemmaLM(DiffusionGemmaConfig(24, 16, 24, 2, 2, (True, False), 4, HEADS, HEADS, 2, 1, 12))
KINDS = {
    "speculative": specjax.speculative(TARGET, DRAFTERS["draft-chain"], logprobs=True),
    "diffusion": diffusion.diffusion(LM, MASK, cache=diffusion.Prefix(), block_length=WIDTH),
    "block": diffusion.diffusion(LM, MASK, causal_blocks=True, block_length=WIDTH),
    "window": diffusion.diffusion(LM, MASK, reordered=True, block_length=WIDTH),
    "causal_context": diffusion.diffusion(LM, MASK, causal_context=True, align="prompt_end", block_length=WIDTH),
    "free_dave": diffusion.diffusion(LM, MASK, free_dave.FreeDave(), block_length=WIDTH),
    "free_dave_blocks": diffusion.diffusion(LM, MASK, free_dave.FreeDave(), causal_blocks=True, block_length=WIDTH),
    "guided": diffusion.diffusion(LM, MASK, GUIDE, block_length=WIDTH),
    "wino": diffusion.diffusion(LM, MASK, wino.Wino(), block_length=WIDTH),
    "canvas": diffusion.CanvasDiffusion(CANVAS, block_length=WIDTH),
    "assd": diffusion.Assd(JointDistribution(3, 4)),
    "beam": BeamSearch(TARGET, Beam(4, 2, diversity_penalty=0.5)),
    "stochastic_beam": StochasticBeamSearch(TARGET, StochasticBeam(3)),
    "superposed": SuperposedSearch(TARGET, Superposed()),
    "smc": SmcSearch(TARGET, Smc(3)),
    "asap": AsapSearch(TARGET, Asap(3, 8)),
    "soft_thinking": soft_thinking(TARGET),
    "entropy_adaptive": EntropyAdaptiveDecoder(TARGET, TARGET),
}


def weights(name):
    if name in ("speculative", "beam", "stochastic_beam", "superposed", "smc", "asap", "soft_thinking"):
        return params()
    if name == "entropy_adaptive":
        return {"target": params()["target"], "small": params()["target"]}
    if name == "canvas":
        return {"target": CANVAS.abstract()}
    return {**small_diffusion.params(), "guide": small_diffusion.params()["target"]}


def kinds(base=decoding.Decoder):
    """All classes of decoders."""
    return {base, *(kind for part in base.__subclasses__() for kind in kinds(part))} - {decoding.Decoder}


def test_the_table_holds_every_decoder():
    ours = {kind for kind in kinds() if kind.__module__.startswith("specjax.") and not inspect.isabstract(kind)}
    ours = {
        kind for kind in ours if kind.__module__ != "specjax.pipelined"
    }  # `Speculative` and its parts on two meshes
    assert {type(decoder) for decoder in KINDS.values()} == ours


@pytest.mark.parametrize("name", KINDS)
def test_decoders_keep_the_protocol(name):
    """The protocol's parameters first, by the same names, kinds and defaults; what a decoder adds is optional. There is one
    `init` and one `insert`."""
    decoder = KINDS[name]
    assert hash(decoder) == hash(dataclasses.replace(decoder))
    assert isinstance(decoder.slack, int) and isinstance(decoder.fills_in, bool)
    assert decoder.reads_prefix == hasattr(decoder, "read_prefix")
    for method in ("init", "insert"):
        assert getattr(type(decoder), method) is getattr(decoding.Decoder, method)
    for method in ("empty", "prefill", "step", "axes"):
        wanted = inspect.signature(getattr(decoding.Decoder, method)).parameters.values()
        own = inspect.signature(getattr(type(decoder), method)).parameters.values()
        plain = lambda p: (p.name, p.kind, p.default)
        assert [plain(p) for p in own][: len(wanted)] == [plain(p) for p in wanted], method
        assert all(p.default is not p.empty for p in list(own)[len(wanted) :]), method


@pytest.mark.parametrize("name", KINDS)
def test_states_begin_alike(name):
    """Blank rows are done, hold nothing, and have axes for every leaf; a state keeps its structure in a step."""
    decoder, of = KINDS[name], weights(name)
    state = jax.eval_shape(lambda of: decoder.empty(of, 3, 4, None, 2), of)
    axes = jax.tree.map(lambda leaf, names: len(names) == leaf.ndim, state, decoder.axes(state))
    assert all(jax.tree.leaves(axes)) and state.eos.shape == (3, 2)
    if name != "canvas":
        done = decoder.empty(of, 3, 4, None, 2)
        assert bool(done.done.all()) and (done.length == done.limit).all() and (done.eos == -1).all()


OWN_STATE = [
    name for name, drafter in DRAFTERS.items() if type(drafter).init is not Drafter.init and "rasd" not in name
]


@pytest.mark.parametrize("name", [*(n for n in KINDS if n != "canvas"), *OWN_STATE, "slow_fast"])
def test_no_two_fields_share_a_buffer(name):
    """A state made outside jit can be donated: `specjax.run` gives every buffer away once."""
    if name == "slow_fast":
        decoder, of = diffusion.diffusion(LM, MASK, diffusion.SlowFast()), small_diffusion.params()
    elif name in KINDS:
        decoder, of = KINDS[name], weights(name)
    else:
        decoder = specjax.speculative(TARGET, DRAFTERS[name], logprobs=True)
        of = params_of(DRAFTERS[name])
    state = decoder.empty(of, 2, 8)
    seen = [leaf.unsafe_buffer_pointer() for leaf in _bare(state)]
    assert len(set(seen)) == len(seen)


def _bare(state):
    """Its leaves, keys as numbers."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(state) if x.size]


def test_a_state_outside_jit_can_be_run():
    decoder = specjax.speculative(TARGET, logprobs=True)
    state = specjax.run(decoder, params(), decoder.empty(params(), 2, 16))
    assert bool(state.done.all())


def test_one_precedence():
    """EOS before the limit, that before a failure; a row that is done stays as it is."""
    cases = list(itertools.product((False, True), repeat=4))
    ended, full, failed, done = (np.asarray(x) for x in zip(*cases, strict=True))
    state = DecodeState.blank(len(cases), 8, 1, length=4, cache=None, draft=())
    state = dataclasses.replace(state, finish=jnp.where(done, Finish.STOP, Finish.RUNNING))
    got = finish_rows(state, jnp.where(full, 4, 3), jnp.asarray(ended), jnp.asarray(failed)).tolist()
    for finish, (ended, full, failed, done) in zip(got, cases, strict=True):
        reasons = (Finish.STOP, done), (Finish.EOS, ended), (Finish.LENGTH, full), (Finish.ERROR, failed)
        assert finish == next((reason for reason, holds in reasons if holds), Finish.RUNNING)


def one_by_one(tokens, room):
    """What a decoder of one token at a time keeps of these (-1: it could not be computed), and why it ends."""
    kept = []
    for token in tokens:
        if token < 0:
            return kept, Finish.ERROR
        kept.append(token)
        if token == EOS:
            return kept, Finish.EOS
        if len(kept) == room:
            return kept, Finish.LENGTH
    return kept, Finish.RUNNING


def test_a_tree_step_ends_where_plain_decoding_does():
    """EOS, limit and failure in every order, within and after each other."""
    texts = [
        tuple(EOS if i == at else 7 for i in range(2)) + (last,) for at in (0, 1, None) for last in (7, EOS, -1)
    ]  # two accepted tokens and the target's own
    cases = list(itertools.product(texts, (1, 2, 3, 9)))
    emitted = jnp.asarray([text for text, _ in cases])
    state = DecodeState.blank(len(cases), 16, 2, length=4, cache=None, draft=())
    state = dataclasses.replace(
        state,
        finish=jnp.zeros_like(state.finish),
        eos=jnp.full_like(state.eos, EOS),
        limit=state.length + jnp.asarray([room for _, room in cases]),
    )
    path = jnp.broadcast_to(jnp.arange(3)[None], emitted.shape)
    verdict = Verdict(path, jnp.full((len(cases),), 2), emitted[:, 2])
    verdict, finish = commit_counts(state, emitted, verdict)
    for row, (text, room) in enumerate(cases):
        kept, reason = one_by_one(text, room)
        assert (int(verdict.committed[row]), int(finish[row])) == (len(kept), reason), (text, room)


def test_a_canvas_step_ends_for_the_same_reasons():
    """Blocks of four whose last token is EOS or not, filled or not, at the limit or before it, computed or failed."""
    decoder = small_diffusion.make(block_length=WIDTH)
    cases = list(itertools.product((7, EOS), (WIDTH, WIDTH + 2), (True, False), (False, True)))
    last, room, filled, failed = (jnp.asarray(x) for x in zip(*cases, strict=True))
    count = len(cases)
    state = decoder.empty(None, count, 8)
    opened = (jnp.arange(8)[None] >= 1) & (jnp.arange(8)[None] < 1 + room[:, None])
    state = dataclasses.replace(
        state,
        tokens=jnp.where(opened, MASK, 3),
        finish=jnp.zeros_like(state.finish),
        length=jnp.ones_like(state.length),
        reached=jnp.ones_like(state.length),
        prompt_length=jnp.ones_like(state.length),
        limit=1 + room,
        eos=jnp.full_like(state.eos, EOS),
        opened=opened,
    )
    at, masked = decoder._masked(state)
    commit = masked & (filled[:, None] | (jnp.arange(WIDTH)[None] != 1)) & ~failed[:, None]
    tokens = jnp.full((count, WIDTH), 7).at[:, -1].set(last)
    choice = diffusion.unmask.base.Choice(commit, jnp.zeros((count, WIDTH)), tokens)
    got = jax.jit(decoder._commit)(state, at, masked, commit, choice, state.memory, failed)
    for row, (last, room, filled, failed) in enumerate(cases):
        text = [-1] if failed else [7, 7, 7, last] if filled else [7]
        kept, reason = one_by_one(text, room)
        assert (int(got.length[row]) - 1, int(got.finish[row])) == (len(kept), reason), cases[row]


def prompts_of(lengths, limits, size):
    """Rows with these lengths and limits."""
    count = len(lengths)
    tokens, keys = np.ones((count, size), np.int32), row_keys(0, ["a"] * count)
    return Prompts(tokens, np.asarray(lengths), keys, np.asarray(limits), SamplingArrays.make(count))


@pytest.mark.parametrize(
    ("lengths", "limits", "message"),
    (
        ((4, 62), (40, 63), "prompt 1 has a limit of 63 tokens.* up to 4 beyond.* capacity of 64, give at least 67"),
        ((4, 30), (40, 30), "prompt 1 has 30 tokens: its limit must be at least 31, got 30"),
        ((0, 30), (40, 40), "prompt 0 is said to have 0 tokens: give 1 to 30"),
    ),
)
def test_rows_that_do_not_fit_are_refused(lengths, limits, message):
    """One by one: a row is not covered by another's limit. Both in `init` and where prompts enter rows."""
    decoder, prompts = KINDS["speculative"], prompts_of(lengths, limits, max(lengths))
    with pytest.raises(ValueError, match=message):
        decoder.init(params(), prompts, capacity=64)
    state, rows = decoder.empty(params(), 4, 64), np.asarray([0, 2])
    with pytest.raises(ValueError, match=message):
        decoder.insert(params(), state, rows, prompts)
    with pytest.raises(ValueError, match=message):
        decoding.insert(decoder, params(), state, rows, prompts)


@pytest.mark.parametrize("name", KINDS)
def test_parameters_that_are_missing_are_named(name):
    """Of every decoder, each entry; a model's parameters alone are none of them."""
    decoder, whole, prompts = KINDS[name], weights(name), prompts_of((4, 5), (10, 10), 5)
    assert {*decoder.needs} <= {*whole} and "target" in decoder.needs
    for entry in decoder.needs:
        for given in (whole[entry], {**whole, entry: None}, {**whole, entry: {}}):
            with pytest.raises(ValueError, match=f'takes params .*"{entry}": .* it got none for .*{entry}'):
                decoder.init(given, prompts, capacity=64)


def test_lines_are_no_drafters_and_verifiers():
    drafted = specjax.speculative(TARGET, specjax.draft.ModelDrafter(TARGET))
    assert (specjax.speculative(TARGET).needs, drafted.needs) == (("target",), ("target", "draft"))
    for given in ({"drafter": "prompt_lookup:length=2"}, {"verifier": "typical"}):
        with pytest.raises(TypeError, match="is not a specjax.*specjax.Engine.*takes a line of text"):
            specjax.speculative(TARGET, **given)


@pytest.mark.parametrize("name", ("diffusion", "canvas", "assd"))
def test_every_decoder_refuses_them(name):
    decoder = KINDS[name]
    state = jax.eval_shape(lambda of: decoder.empty(of, 2, 4), weights(name))
    prompts = prompts_of((2, 3), (4, 5), 3)
    with pytest.raises(ValueError, match="prompt 1 has a limit of 5 tokens.* capacity of 4, give at least 5"):
        decoder.insert({}, state, np.asarray([0, 1]), prompts)
    decoding.check_rows(decoder, 4, prompts, np.asarray([0, 2]), 2)  # row 2 of two is dropped, whatever it says


ROWS = Prompts.of([[7, 3, 4], [7, 5, 6, 2, 1]], [6, 4], seed=0)
LEFT = np.asarray([[0, 0, 7, 3, 4], [7, 5, 6, 2, 1]])
KEY = jax.random.key(0)
MISTAKES = {  # what a row needs, and what is given instead
    "one key": ({"keys": KEY}, r"keys are of shape \(\), and there are 2 prompts: give a key per row"),
    "a key for both": ({"keys": KEY[None]}, r"keys are of shape \(1,\), and there are 2 prompts"),
    "an old key": ({"keys": jax.random.PRNGKey(0)}, "keys are not typed.* jax.random.wrap_key_data"),
    "old keys": ({"keys": jax.random.split(jax.random.PRNGKey(0))}, "keys are not typed"),
    "a seed": ({"keys": 0}, "keys are not typed"),
    "other keys": ({"keys": jax.random.split(jax.random.key(0, impl="rbg"))}, "keys are rbg keys"),
    "left padding": ({"tokens": LEFT}, "prompt 0 is padded on the left with the id 0: pad on the right"),
    "one length": ({"lengths": 3}, r"lengths are of shape \(\): give one per prompt, \[2\]"),
    "one prompt": ({"tokens": LEFT[0]}, r"tokens are of shape \(5,\): give \[R, P\]"),
    "ends of one row": ({"eos": np.asarray([5])}, r"eos is of shape \(1,\): give \[2, K\]"),
    "more samplers": ({"sampling": SamplingArrays.make(3)}, r"sampling is of 3 rows: .*SamplingArrays.make\(2\)"),
    "more limits": ({"limit": np.asarray([9, 9, 9])}, r"limit is of shape \(3,\): give one per prompt"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_key_a_row_and_padding_on_the_right(mistake):
    """In `init`, in `insert`, and where the shapes alone are known, under jit: an array of one row is not spread over all."""
    decoder = KINDS["speculative"]
    given, message = MISTAKES[mistake]
    prompts = dataclasses.replace(ROWS, **given)
    with pytest.raises(ValueError, match=message):
        decoder.init(params(), prompts, capacity=64)
    with pytest.raises(ValueError, match=message):
        decoding.insert(decoder, params(), decoder.empty(params(), 2, 64), np.arange(2), prompts)
    if "padding" not in message and "padded" not in message:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda of: decoder.init(of, prompts, capacity=64), params())


@pytest.mark.parametrize("name", ("diffusion", "canvas", "assd", "beam", "entropy_adaptive", "soft_thinking"))
def test_every_decoder_wants_a_key_a_row(name):
    decoder, of = KINDS[name], jax.eval_shape(lambda: weights(name))
    state = jax.eval_shape(lambda of: decoder.empty(of, 2, 64), of)
    prompts = dataclasses.replace(ROWS, keys=KEY)
    with pytest.raises(ValueError, match="give a key per row"):
        jax.eval_shape(lambda of, state: decoder.insert(of, state, np.arange(2), prompts), of, state)


@pytest.mark.slow
def test_keys_of_a_single_key_give_each_row_noise_of_its_own():
    """`jax.random.split` is another way to one key per row: two rows of one prompt are two draws."""
    decoder, prompts = (
        specjax.speculative(TARGET),
        Prompts.of([[7, 3, 4]] * 2, 12, keys=jax.random.split(KEY, 2), temperature=1.0),
    )
    state = decoder.init(params(), prompts, capacity=64)
    first, second = np.asarray(specjax.run(decoder, params(), state).tokens)[:, 3:15].tolist()
    assert first != second


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    (
        ([[0, 0, 7, 0, 0], [7, 5, 6, 2, 1]], [3, 5]),  # begins as padding does
        ([[7, 7, 7, 1, 2], [7, 5, 6, 2, 1]], [3, 4]),  # anything may lie after a prompt
        ([[7, 3, 4, 1, 2], [8, 5, 6, 2, 1]], [3, 4]),
    ),
)
def test_prompts_that_are_padded_on_the_right(tokens, lengths):
    prompts = dataclasses.replace(ROWS, tokens=np.asarray(tokens), lengths=np.asarray(lengths))
    decoding.check_rows(KINDS["speculative"], 64, prompts)


def test_prompts_of_lists():
    """Padded, with the noise of `row_keys`, and each row's own number of new tokens."""
    made = Prompts.of([[7, 3, 4], np.asarray([5])], [2, 0], seed=[3, 3], eos=(1, 2), temperature=[0.0, 1.0], top_k=2)
    assert made.tokens.tolist() == [[7, 3, 4], [5, 0, 0]] and made.lengths.tolist() == [3, 1]
    assert made.limit.tolist() == [5, 1] and made.eos.tolist() == [[1, 2]] * 2 and made.width is None
    assert made.sampling.temperature.tolist() == [0, 1] and made.sampling["top_k"].tolist() == [2, 2]
    wanted = jax.random.key_data(row_keys(3, [(7, 3, 4), (5,)]))
    np.testing.assert_array_equal(jax.random.key_data(made.keys), wanted)
    for wrong in ("abc", [7, 3, 4], [["a"]], [[0.5]]):
        with pytest.raises(ValueError, match="prompts are lists of token ids, one per row"):
            Prompts.of(wrong, 4)


def test_ends_of_a_text_for_a_state_with_room_for_more():
    assert Prompts.of([[7], [5]], 1, eos=(1, 2)).ends(3).tolist() == [[1, 2, -1]] * 2
    assert dataclasses.replace(ROWS, eos=None).ends(1).tolist() == [[-1]] * 2
    with pytest.raises(ValueError, match=r"2 ids end a text, and the state has room for 1: .*eos_width=2"):
        Prompts.of([[7]], 1, eos=(1, 2)).ends(1)


def test_only_who_fills_in_takes_open_positions():
    """Whatever its mask id is; those of the prompt are open as those after it."""
    prompts, masked = (Prompts.of([[3, mark, 4]], 2, seed=0) for mark in (OPEN, MASK))
    begin = lambda prompts: KINDS["diffusion"].init(small_diffusion.params(), prompts, capacity=32)
    got, wanted = begin(prompts), begin(masked)
    assert got.tokens.tolist() == wanted.tokens.tolist()
    assert got.opened[0, :6].tolist() == [False, True, False, True, True, False]
    with pytest.raises(ValueError, match="prompt 0 holds -1, an open position, and this decoder writes from left to"):
        KINDS["speculative"].init(params(), prompts, capacity=32)


@pytest.mark.parametrize("name", ("speculative", "beam", "entropy_adaptive"))
def test_a_row_may_fill_its_buffer(name):
    """Up to the slots that its own steps need, and not those of what reads its prompt."""
    decoder = KINDS[name]
    state = decoder.init(weights(name), Prompts.of([[1, 2, 3]], 5), capacity=8 + decoder.slack)
    assert state.limit.tolist() == [8]


def test_a_prefix_where_none_is_read():
    decoder = KINDS["diffusion"]
    state = jax.eval_shape(lambda of: decoder.empty(of, 2, 64), weights("diffusion"))
    with pytest.raises(
        ValueError, match="a DiffusionDecoder cannot share a prefix among prompts: leave the prefix out"
    ):
        decoder.insert({}, state, np.arange(2), ROWS, prefix=object())
