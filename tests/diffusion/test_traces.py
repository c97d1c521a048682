"""What published samplers wrote on tiny models is reproduced: tokens, order and passes, as far as each line compares them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import diffusion_traces as traces
from support.diffusion_traces import needs_traces

from specjax.diffusion import Levenshtein
from specjax.diffusion import decoder as decoding
from specjax.diffusion.unmask.base import RULES

FAST = ("fast_dllm_v2-1", "prophet-1")
PUBLISHED = ("dream-6", "fast_dllm_factor-1", "fast_dllm_factor-3")
"""Where the original is the field `published=True`: passes that write nothing, and the last candidate of a block."""
MISSAID = {"bd3lm-5": "fixed:steps=12"}
"""Where a line's call has other steps than its passes show: the original's 24 over two blocks, the second a part of one."""
LIKELIEST = "sdar_warped"
"""Settings with the likeliest token of the warped distribution in place of a drawn one, so that all of a line is
compared."""
LIKELIEST_TIED = {"sdar_warped-7": [["order"], [], ["tokens", "order"]]}
"""What differs there where top-p leaves one token at more positions than a pass commits, as in `TIED`."""
TIED = ("dream_warped-1", "dream_warped-3")
"""Where top-p leaves one token at more positions than a pass commits, so that all of them are equally sure: the original takes
those that its library's selection happens to leave in front, this one the lower positions. The first line has no such tie."""
OVERASKED = "learn2pd-4"
"""Where the original asks for more tokens than the block has open, and writes wherever its library's selection falls: in the
first line at position 20, two blocks ahead."""
ENDED = "eotp-3"
"""Whose second line has an end of text in the middle. All before it is known, so the text ends there; the original goes on."""
GREEDY = lambda steps, block, refresh, reach: {
    "unmask": f"fixed:steps={steps},rule=order",
    "cache": f"greedy:refresh={refresh},reach={reach}",
    "block_length": block,
}
DREAM = lambda line, **options: {"unmask": f"dream:{line}", "cache": "none", "block_length": 32, **options}
INSIDE = {
    "dkv_greedy-1": GREEDY(8, 16, 2, 4), "dkv_greedy-2": GREEDY(32, 32, 4, 2), "dkv_greedy-3": GREEDY(8, 8, 2, 0),
    "dream_origin-1": DREAM("steps=8,rule=origin,published=True"),
    "dream_origin-2": DREAM("steps=16,rule=origin,published=True"),
}  # fmt: skip
"""Settings with given random numbers."""
WARPED = {
    "dream_warped-1": DREAM("steps=4,rule=entropy", temperature=0.4, top_p=0.9),
    "dream_warped-3": DREAM("steps=4,rule=margin", temperature=0.5, top_p=0.9),
    "dream_warped-5": DREAM("steps=8,rule=low_confidence", temperature=0.5, top_p=0.9),
    "dream_warped-6": DREAM("steps=4,rule=low_confidence", temperature=1.0, top_p=0.8),
}
"""Settings with the likeliest token of the warped distribution in place of a drawn one, and ties as in `TIED`."""

EDITED = [name for name in traces.lines() if name.startswith("indel")]


def reproduced(setting):
    lines = traces.lines()[setting]
    says = lambda line, unmask: line | {"call": line["call"] | {"unmask": unmask}}
    if setting in PUBLISHED:
        lines = [says(line, line["call"]["unmask"] + ",published=True") for line in lines]
    if setting in MISSAID:
        lines = [says(line, MISSAID[setting]) for line in lines]
    seen, state = traces.run(lines)
    return {row: found for row, line in enumerate(lines) if (found := traces.differences(line, seen, state, row))}


@needs_traces
@pytest.mark.parametrize("setting", FAST)
def test_a_few_settings(setting):
    assert reproduced(setting) == {}


OTHERS = [name for name in traces.lines() if name not in (*FAST, *TIED, OVERASKED, ENDED)]


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("setting", [name for name in OTHERS if not name.startswith(LIKELIEST)])
def test_every_other_setting(setting):
    assert reproduced(setting) == {}


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("setting", [name for name in OTHERS if name.startswith(LIKELIEST)])
def test_confidences_of_the_warped_distribution(setting, monkeypatch):
    """With the draw replaced as in the original, tokens, order and passes are its own."""
    monkeypatch.setattr(decoding, "draws", lambda scores, keys, at, sampled: jnp.argmax(scores, axis=-1))
    lines = [line | {"compare": ["tokens", "order", "passes"]} for line in traces.lines()[setting]]
    seen, state = traces.run(lines)
    found = [traces.differences(line, seen, state, row) for row, line in enumerate(lines)]
    assert found == LIKELIEST_TIED.get(setting, [[], [], []])


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("setting", TIED)
def test_ties_alone_are_broken_otherwise(setting):
    assert reproduced(setting) == {1: ["first"], 2: ["first"]}


@needs_traces
@pytest.mark.slow
def test_where_the_original_writes_ahead():
    assert set(reproduced(OVERASKED)) == {0, 1, 2}
    for line in traces.lines()[OVERASKED]:
        order, size = line["order"], line["call"]["block_length"]
        ends = range(size, len(order), size)
        assert any(min(order[end:]) <= max(order[:end]) for end in ends)  # written before an earlier block was done


@needs_traces
@pytest.mark.slow
def test_a_text_ends_at_its_first_end():
    assert set(reproduced(ENDED)) == {1}
    lines = traces.lines()[ENDED]
    seen, state = traces.run(lines)
    begin, end = len(lines[1]["prompt"]), int(state.length[1])
    text = seen[-1, 1, begin:end].tolist()
    assert text == lines[1]["tokens"][: len(text)] and text[-1] == 62


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("setting", EDITED)
def test_edits_are_as_many(setting, monkeypatch):
    """Positions deleted and split, and tokens changed since a block came again."""
    passes, lines = [{}], traces.lines()[setting]

    def counted(name, closes):
        def add(counts):
            passes[-1][name] = passes[-1].get(name, 0) + np.asarray(counts)
            if closes:
                passes.append({})

        return lambda counts: jax.debug.callback(add, counts.astype(jnp.int32), ordered=True)

    tell = {name: counted(name, name == "split") for name in ("delete", "split", "escape")}
    moved, redrawn = Levenshtein.moved, Levenshtein.redrawn

    def moving(self, guess, written, original):
        own = guess.masked | guess.committed
        tell["delete"]((own & (written == self.delete_token_id)).sum(axis=1))
        tell["split"]((own & (written == self.split_token_id)).sum(axis=1))
        return moved(self, guess, written, original)

    def drawing(self, guess, block, sure, moves, when, before):
        tell["escape"](when & moves.any(axis=1))
        return redrawn(self, guess, block, sure, moves, when, before)

    monkeypatch.setattr(Levenshtein, "moved", moving)
    monkeypatch.setattr(Levenshtein, "redrawn", drawing)
    _, state = traces.run(lines)
    jax.effects_barrier()
    for row, line in enumerate(lines):
        own = passes[: int(state.stats.steps[row])]
        assert {name: sum(int(one[name][row]) for one in own) for name in tell} == line["edits"]


def given_noise(setting):
    """A decoder like another, whose noise is what the originals were given: by pass and position, or by position alone."""
    uniforms = np.random.default_rng(3).random((64, 64)).astype(np.float32)
    ordering = np.random.default_rng(4).random(64).astype(np.float32)

    def of(decoder):
        class Given(type(decoder)):
            def _noise(self, state, at):
                place = jnp.clip(at - state.prompt_length[:, None], 0, 63)
                if setting.startswith("dkv"):
                    return jnp.asarray(ordering)[place]
                return jnp.asarray(uniforms)[jnp.minimum(state.step, 63)[:, None], place]

        return Given(**{field.name: getattr(decoder, field.name) for field in dataclasses.fields(decoder)})

    return of


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("setting", INSIDE)
def test_with_given_random_numbers(setting):
    lines = [line | {"call": INSIDE[setting]} for line in traces.lines_of(setting)]
    seen, state = traces.run(lines, given_noise(setting))
    found = {row: traces.differences(line, seen, state, row) for row, line in enumerate(lines)}
    assert found == {0: [], 1: [], 2: []}


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("setting", WARPED)
def test_what_is_written_is_the_likeliest_and_as_sure_as_any(setting, monkeypatch):
    """Pass by pass over the original's canvases: its tokens are the likeliest, and what it leaves open is not surer."""
    monkeypatch.setattr(decoding, "draws", lambda scores, keys, at, sampled: jnp.argmax(scores, axis=-1))
    lines = [line | {"call": WARPED[setting]} for line in traces.lines_of(setting)]
    engine, state = traces.start(lines)
    at, _ = engine.decoder._masked(state)
    score = RULES[engine.decoder.policy.rule]

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def look(tokens):
        canvas = dataclasses.replace(state, tokens=tokens)
        guess, _ = engine.decoder._predict(engine.params, canvas, at, engine.decoder._masked(canvas)[1])
        return guess.tokens, score(guess)

    ties = 0
    for turn in range(lines[0]["passes"]):
        tokens = np.array(state.tokens)
        for row, line in enumerate(lines):
            known = np.asarray(line["order"]) < turn
            tokens[row, len(line["prompt"]) :][: len(known)][known] = np.asarray(line["tokens"])[known]
        likeliest, sure = map(np.asarray, look(jnp.asarray(tokens)))
        for row, line in enumerate(lines):
            order = np.asarray(line["order"])
            written, left = order == turn, order > turn
            assert (likeliest[row][written] == np.asarray(line["tokens"])[written]).all()
            least, most = sure[row][written].min(), sure[row][left].max(initial=-np.inf)
            assert least >= most - 1e-4
            ties += abs(least - most) < 1e-4
    assert ties  # else the setting belongs to the others
