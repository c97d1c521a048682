"""What published samplers wrote on tiny models is reproduced: tokens, order and passes, as far as each line compares them."""

import pytest
from support import diffusion_traces as traces

FAST = ("fast_dllm_v2-1", "prophet-1")
PUBLISHED = ("dream-6", "fast_dllm_factor-1", "fast_dllm_factor-3")
"""Where the original is the field `published=True`: passes that write nothing, and the last candidate of a block."""
TIED = ("dream_warped-1", "dream_warped-3")
"""Where top-p leaves one token at more positions than a pass commits, so that all of them are equally sure: the original takes
those that its library's selection happens to leave in front, this one the lower positions. The first line has no such tie."""
OVERASKED = "learn2pd-4"
"""Where the original asks for more tokens than the block has open, and writes wherever its library's selection falls: in the
first line at position 20, two blocks ahead."""
ENDED = "eotp-3"
"""Whose second line has an end of text in the middle. All before it is known, so the text ends there; the original goes on."""
REFUSED = {
    "free_dave-1": "takes neither a cache nor guidance", "free_dave-3": "takes neither a cache nor guidance",
    "free_dave-5": "no field 'eager'", "free_dave_block-1": "reads whole canvases",
    "free_dave_block-3": "reads whole canvases",
}  # fmt: skip
"""Settings that cannot be said yet, and how they are refused."""

needs_traces = pytest.mark.skipif(
    not traces.FOLDER.is_dir(), reason="needs the folder diffusion_traces in shared/data beside this checkout"
)


def reproduced(setting):
    lines = traces.lines()[setting]
    if setting in PUBLISHED:
        lines = [
            line | {"call": line["call"] | {"unmask": line["call"]["unmask"] + ",published=True"}} for line in lines
        ]
    seen, state = traces.run(lines)
    return {row: found for row, line in enumerate(lines) if (found := traces.differences(line, seen, state, row))}


@needs_traces
@pytest.mark.parametrize("setting", FAST)
def test_a_few_settings(setting):
    assert reproduced(setting) == {}


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [name for name in traces.lines() if name not in (*FAST, *TIED, *REFUSED, OVERASKED, ENDED)]
)
def test_every_other_setting(setting):
    assert reproduced(setting) == {}


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
@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_said_yet_is_refused(setting):
    with pytest.raises(ValueError, match=REFUSED[setting]):
        traces.engine_of(traces.lines()[setting][0])
