"""Rollouts: the text of plain decoding, log-probabilities by name, groups, ends, new parameters, layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.conformance import DRAFTERS, TARGET, params, same, texts
from support.margin import teacher_forced

import specjax
from specjax.draft import Suffix
from specjax.prompts import Prompts
from specjax.rollouts import reshard, samples, token_logprobs

IDS = ((7, 3, 9, 7, 3, 9, 7), (11, 5, 2))
GROUP, NEW, CAPACITY = 2, 6, 48
HEAT, CUT = 0.7, 8


def given(group=GROUP, new=NEW, **options):
    """`group` rows of each of the prompts."""
    repeated = [ids for ids in IDS for _ in range(group)]
    return Prompts.of(repeated, new, **{"seed": 3, "temperature": HEAT, "top_k": CUT, **options})


def of_target(**more):
    return {"target": params()["target"], "draft": None, **more}


def sampled(drafter=None, model=None, *, prompts=None, group=GROUP, **options):
    decoder = specjax.speculative(TARGET, drafter)
    prompts = given(group) if prompts is None else prompts
    return specjax.rollout(decoder, model or of_target(), prompts, group=group, capacity=CAPACITY, **options)


def said(found):
    """The completions' tokens, row by row."""
    own = found.completions(NEW)
    return [row[:count].tolist() for row, count in zip(*map(np.asarray, (own.tokens, own.mask.sum(1))), strict=True)]


@pytest.fixture(scope="module")
def found():
    return sampled(logprobs=samples.LOGPROBS)


@pytest.fixture(scope="module")
def wanted():
    """Plain decoding's completions, each row read by itself."""
    decoder = specjax.speculative(TARGET)
    return texts(specjax.run(decoder, of_target(), decoder.init(of_target(), given(), capacity=CAPACITY)))


def test_a_rollout_has_the_text_of_plain_decoding(found, wanted):
    same(said(found), wanted)
    assert found.steps.tolist() == [NEW] * len(wanted) and not found.finished.any()
    assert len({tuple(row) for row in wanted}) == len(wanted)  # a group's samples differ
    whole = [list(ids) for ids in IDS for _ in range(GROUP)]
    for row, (begin, own) in enumerate(zip(whole, wanted, strict=True)):
        assert found.tokens[row].tolist() == [*begin, *own, *[0] * (CAPACITY - len(begin) - len(own))]


def test_log_probabilities_are_their_formulas(found):
    mask = np.asarray(found.mask)
    for row, (length, end) in enumerate(zip(found.prompt_lengths.tolist(), found.lengths.tolist(), strict=True)):
        ids = found.tokens[row, :end].tolist()
        logits = jnp.asarray(teacher_forced(TARGET, of_target()["target"], ids))[length - 1 : end - 1]
        own = jnp.asarray(ids[length:])[:, None]
        kept = logits >= jnp.sort(logits, axis=1)[:, -CUT][:, None]
        scores = {"raw": logits, "tempered": logits / HEAT, "warped": jnp.where(kept, logits / HEAT, -jnp.inf)}
        for name, each in scores.items():
            right = jnp.take_along_axis(jax.nn.log_softmax(each), own, axis=1)[:, 0]
            np.testing.assert_allclose(found.logprobs[name][row][mask[row]], right, atol=2e-5, err_msg=name)
    assert all(not np.asarray(x)[~mask].any() for x in found.logprobs.values())
    assert not np.allclose(found.logprobs["raw"], found.logprobs["tempered"])


def test_new_parameters_prompts_and_seeds_run_the_same_program(found):
    before = samples._program._cache_size()
    other = jax.tree.map(lambda x: x * 0.5, of_target()["target"])
    longer = Prompts.of([[9] * 9] * 4, NEW - 1, seed=8, temperature=0.3, top_k=2)
    again = sampled(model=of_target(target=other), logprobs=samples.LOGPROBS)
    more = sampled(prompts=longer, logprobs=samples.LOGPROBS)
    assert samples._program._cache_size() == before
    assert said(again) != said(found) and more.lengths.tolist() == [9 + NEW - 1] * 4


@pytest.mark.slow
def test_scores_of_texts_are_the_rollout_s(found):
    target, heat = of_target()["target"], jnp.full((len(found.tokens),), HEAT)
    score = lambda target, heat: token_logprobs(TARGET, target, found.tokens, temperature=heat, chunk=7)
    mask = np.asarray(found.mask)
    got = jax.jit(lambda target: [score(target, each) for each in (1.0, heat)])(target)
    for name, each in zip(("raw", "tempered"), got, strict=True):
        np.testing.assert_allclose(np.asarray(each)[mask], np.asarray(found.logprobs[name])[mask], atol=2e-5)


@pytest.mark.slow
def test_the_gradient_of_scores_is_that_of_whole_logits(found):
    target, tokens = of_target()["target"], found.tokens[:, :16]

    def whole(target):
        at = jnp.broadcast_to(jnp.arange(16)[None], tokens.shape)
        block = specjax.lm.Block(tokens, at, jnp.zeros((len(tokens),), jnp.int32))
        logits = TARGET(target, block, None, wants=specjax.lm.Wants(logits=True)).logits
        own = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=2)
        return own.mean()

    chunked = lambda target: token_logprobs(TARGET, target, tokens, chunk=4)[:, 1:].mean()
    one, other = (jax.jit(jax.grad(each))(target) for each in (whole, chunked))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, other)


@pytest.mark.slow
def test_raw_log_probabilities_are_those_of_score():
    model = specjax.load("tiny-draft", dtype="float32")
    ids = [model.tokenizer(text)["input_ids"] for text in ("[ hen, dog, hen,", "[ cup, red,")]
    prompts = Prompts.of([own for own in ids for _ in range(2)], 8, seed=1, temperature=1.0, top_p=0.9)
    everything = {"target": model.params, "draft": None}
    found = specjax.rollout(
        specjax.speculative(model.lm), everything, prompts, group=2, capacity=64, logprobs=("raw", "warped")
    )
    own = found.completions(8)
    rows = [row[:count].tolist() for row, count in zip(np.asarray(own.tokens), own.mask.sum(1), strict=True)]
    scores = specjax.score(model, [each for each in ids for _ in range(2)], rows)
    for row, score in enumerate(scores):
        np.testing.assert_allclose(own.logprobs["raw"][row][: len(score.tokens)], score.logprobs, atol=5e-5)
    how = specjax.Sampling(max_new_tokens=8, seed=1, temperature=1.0, top_p=0.9, ignore_eos=True)
    records = specjax.generate(model, ids, sampling=how, num_return_sequences=2)
    same(rows, [list(record.tokens) for record in records])


@pytest.mark.slow
@pytest.mark.parametrize("name", ("suffix-shared", "draft-chain", "eagle3"))
def test_a_drafter_leaves_samples_and_log_probabilities_alone(found, wanted, name):
    drafted = sampled(DRAFTERS[name], params(name), logprobs="warped")
    same(said(drafted), wanted)
    np.testing.assert_allclose(drafted.logprobs["warped"], found.logprobs["warped"], atol=2e-5)
    assert list(drafted.logprobs) == ["warped"]
    assert name != "draft-chain" or drafted.steps.sum() < found.steps.sum()


@pytest.mark.slow
def test_rows_end_at_different_places(wanted):
    """At an end of text, which is kept and counts, or at a row's own limit."""
    eos = wanted[0][2]
    limits = [NEW, NEW, 2, NEW]
    ended = sampled(prompts=given(new=limits, eos=[eos]), logprobs="raw")
    cut = [row[:limit] for row, limit in zip(wanted, limits, strict=True)]
    cut = [row[: row.index(eos) + 1] if eos in row else row for row in cut]
    same(said(ended), cut)
    assert ended.finished.tolist() == [eos in row for row in cut]
    open_ended = ended.completions(NEW, pad=95, end=False)
    for row, own in enumerate(cut):
        kept = [token for token in own if token != eos]
        assert open_ended.tokens[row].tolist() == [*kept, *[95] * (NEW - len(kept))]
    assert ended.mask.sum(axis=1).tolist() == list(map(len, cut))


@pytest.mark.slow
def test_suffix_goes_on_with_what_earlier_calls_wrote():
    drafter = Suffix(4, span=8, pieces=16, piece=16, matches=4)
    greedy = given(new=12, temperature=0.0, top_k=0)
    first = sampled(drafter, prompts=greedy)
    again = sampled(drafter, prompts=greedy, learnt=first.learnt)
    same(np.asarray(again.tokens).tolist(), np.asarray(first.tokens).tolist())
    assert again.steps.sum() < first.steps.sum()
    with pytest.raises(ValueError, match="learnt is of another drafter, number of rows or capacity"):
        sampled(Suffix(4, span=8, pieces=20, piece=16, matches=4), prompts=greedy, learnt=first.learnt)


@pytest.mark.slow
def test_training_and_rollouts_may_have_other_layouts(wanted):
    """Rows of every matrix over `data` while training, heads over `model` in rollouts, on other devices: one call."""
    devices = np.asarray(jax.devices())
    training = jax.sharding.Mesh(devices[:2], ("data",))
    split = lambda x: NamedSharding(training, PartitionSpec(*["data" if x.ndim > 1 and x.shape[0] % 2 == 0 else None]))
    trained = jax.device_put(of_target()["target"], jax.tree.map(split, of_target()["target"]))
    decoder = specjax.speculative(TARGET, DRAFTERS["suffix-shared"], mesh=jax.sharding.Mesh(devices[2:4], ("model",)))
    model = reshard(decoder, {"target": trained, "draft": None})
    assert jax.tree.map(lambda x: x.sharding, model) == decoder.param_shardings(model)
    got = specjax.rollout(decoder, model, given(), group=GROUP, capacity=CAPACITY)
    same(said(got), wanted)
    before = samples._program._cache_size()
    specjax.rollout(
        decoder, reshard(decoder, {"target": trained, "draft": None}), given(), group=GROUP, capacity=CAPACITY
    )
    assert samples._program._cache_size() == before
    small = reshard(decoder, {"target": trained, "draft": None}, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(small)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.tree.map(lambda x: x.sharding, small) == decoder.param_shardings(model)


@pytest.mark.slow
def test_it_may_be_part_of_a_program(found):
    decoder = specjax.speculative(TARGET)
    program = jax.jit(
        lambda model, prompts: specjax.rollout(decoder, model, prompts, group=GROUP, capacity=CAPACITY).tokens
    )
    same(program(of_target(), given()).tolist(), found.tokens.tolist())


@pytest.mark.parametrize(
    ("options", "why"),
    (
        ({"logprobs": "tempred"}, "unknown log-probabilities 'tempred'; choose raw, tempered, warped"),
        ({"group": 3}, "4 rows are no groups of 3: give a row for each sample of every prompt"),
        ({"group": 4, "prompts": given(2)}, "prompt 2 differs from the first of its group of 4"),
        ({"group": 2.0}, "4 rows are no groups of 2.0"),
        ({"prompts": given(new=60)}, "does not fit a capacity of 48"),
    ),
)
def test_mistakes_are_said(options, why):
    with pytest.raises(ValueError, match=why):
        sampled(**{"prompts": given(), **options})


def test_a_group_has_one_source():
    start = Prompts.of([[1]] * 4, NEW, source=[[2, 3], [2, 3], [2, 3], [2, 4]])
    samples._check_group(start, 1)
    with pytest.raises(ValueError, match="prompt 3 differs from the first of its group of 2"):
        samples._check_group(start, 2)


def test_layouts_need_a_mesh():
    with pytest.raises(ValueError, match="no mesh to place parameters on"):
        reshard(specjax.speculative(TARGET), of_target())


@pytest.mark.slow
def test_a_head_that_is_fitted_to_the_samples_drafts_better(found, wanted):
    """With the same text, and by the same program."""
    from specjax.draft.eagle3.objective import TrainEagle3
    from specjax.objectives.base import Batch
    from specjax.train.loop import Settings, TrainState, update

    drafter = specjax.speculative(TARGET, DRAFTERS["eagle3"]).drafter
    stale = sampled(drafter, params("eagle3"))
    objective, settings = TrainEagle3(drafter=drafter, unroll=2), Settings(100, learning_rate=1e-2)
    state = TrainState.begun(settings, jax.tree.map(jnp.array, params("eagle3")["draft"]))
    for _ in range(30):
        state, _ = update(objective, settings, state, params()["target"], Batch(found.tokens, found.mask))
    before = samples._program._cache_size()
    fresh = sampled(drafter, {**params("eagle3"), "draft": state.params})
    assert samples._program._cache_size() == before
    same(said(stale), wanted)
    same(said(fresh), wanted)
    assert fresh.steps.sum() < stale.steps.sum()
