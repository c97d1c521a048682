"""What holds for every policy and cache that the registry lists: drawn rows alone and in a batch, EOS, broken weights,
no retrace, and what each says of its text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import optimised
from support.conformance import but_slow
from support.small_diffusion import (
    LIMITS,
    LM,
    MASK,
    PROMPTS,
    begin,
    caches,
    everything,
    going_together,
    texts,
)

import specjax
from specjax import decoder as decoding
from specjax.assembly.registry import CACHES, UNMASKS
from specjax.diffusion import Threshold, diffusion
from specjax.state import Finish

ROWS = (0, 1, 2)
ALL = going_together()
OWN = [name for name, decoder in ALL.items() if type(decoder) is not type(ALL["threshold"])]
"""Policies with a decoder of their own: these, another, one with a cache and one by blocks are all kinds there are."""
KINDS = {
    **{name: lambda name=name: ALL[name] for name in UNMASKS},
    **{
        f"cache {name}": lambda cache=cache: diffusion(LM, MASK, Threshold(0.4), cache, block_length=8)
        for name, cache in caches().items()
    },
    "blocks": lambda: diffusion(LM, MASK, Threshold(0.4), block_length=8, causal_blocks=True),
}
RARE = (
    "dream", "factor", "entropy", "eb", "local_leap", "hierarchy", "slow_fast", "credit", "prophet", "end_of_text", "learn2pd",
    "remdm", "redo", "klass", "longest_prefix", "multi_block", "p2", "rediff", "joint_threshold", "levenshtein",
    "rcr",
)  # fmt: skip
"""Policies that the fast set tries elsewhere."""
FAST = ("threshold", "cache dual", "blocks", *OWN)


@pytest.fixture(
    scope="module",
    params=but_slow(
        KINDS,
        "fixed",
        "sequential",
        *RARE,
        "cache prefix",
        "cache delayed",
        "cache greedy",
        "cache freeze",
        "cache interval",
        "cache vicinity",
        "cache block_causal",
    ),
)
def decoder(request):
    return KINDS[request.param]()


def finished(decoder, model=None, **settings):
    rows, model = settings.pop("rows", ROWS), model or everything()
    return specjax.run(decoder, model, begin(decoder, rows, model=model, **settings))


@pytest.mark.slow
def test_a_drawn_row_alone_is_a_row_in_a_batch(decoder):
    together = texts(finished(decoder, temperature=0.8))
    greedy = texts(finished(decoder))
    assert together != greedy  # it is drawn
    assert texts(finished(decoder, rows=(2,), temperature=0.8)) == [together[2]]
    for text, row in zip(greedy, ROWS, strict=True):
        assert len(text) == LIMITS[row] and MASK not in text and text[: len(PROMPTS[row])] == list(PROMPTS[row])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_the_optimised_program(name):
    """What users run says the same, of a row alone too."""
    decoder, model = KINDS[name](), everything()
    steps = jnp.int32(decoding.NO_LIMIT), jnp.int32(1)
    state = begin(decoder, ROWS, model=model, temperature=0.8)
    program = optimised(decoding.run_program.lower(decoder, model, state, *steps))
    together = texts(program(model, state, *steps))
    assert together == texts(finished(decoder, temperature=0.8))
    alone = begin(decoder, (2,), model=model, temperature=0.8, slots=len(ROWS))
    assert texts(program(model, alone, *steps))[:1] == together[2:]


def test_eos_cuts_the_same_text(decoder):
    """But of a row whose canvas a policy ended at what was only predicted."""
    whole = texts(finished(decoder))
    eos = whole[0][len(PROMPTS[0]) + 2]
    cut = finished(decoder, eos=eos)
    for row, (text, full) in enumerate(zip(texts(cut), whole, strict=True)):
        new = full[len(PROMPTS[row]) :]
        end = new.index(eos) + 1 if eos in new else len(new)
        ended = text == full[: len(PROMPTS[row]) + end] and int(cut.finish[row]) == (
            Finish.EOS if eos in new else Finish.LENGTH
        )
        assert (ended or int(cut.limit[row]) < LIMITS[row]) and MASK not in text


def test_broken_weights_end_the_rows_and_nothing_is_traced_again(decoder):
    model = everything()
    finished(decoder)
    compiled = decoding.run_program._cache_size()
    broken = finished(decoder, {**model, "target": jax.tree.map(lambda x: x * jnp.nan, model["target"])})
    assert (broken.finish == Finish.ERROR).all() and not np.isin(MASK, texts(broken)[0])
    finished(decoder, temperature=1.3, eos=3)
    assert decoding.run_program._cache_size() == compiled


@pytest.mark.parametrize(
    "cache", but_slow(CACHES, "prefix", "dual", "delayed", "greedy", "freeze", "interval", "vicinity", "block_causal")
)
@pytest.mark.parametrize("name", [name for name, entry in UNMASKS.items() if entry.guarantee == "same text"])
def test_policies_of_the_same_text_write_that_of_plain_decoding(name, cache):
    """`fixed` with the same cache, where they take it; without a cache they all do."""
    cached = going_together(cache=CACHES[cache].make())
    assert name in cached or cache != "none"
    if name in cached:
        ours, plain = (finished(cached[each], rows=range(4)) for each in (name, "fixed"))
        assert texts(ours) == texts(plain)


@pytest.mark.parametrize("name", [name for name, entry in CACHES.items() if entry.guarantee == "same text"])
def test_caches_of_the_same_text_write_that_of_no_cache(name):
    decoders = [diffusion(LM, MASK, Threshold(0.4), cache, block_length=8) for cache in (CACHES[name].make(), None)]
    assert len({str(texts(finished(decoder, rows=range(4)))) for decoder in decoders}) == 1


@pytest.mark.parametrize(
    "name",
    but_slow(
        going_together(causal_blocks=True),
        "threshold",
        "fixed",
        "free_dave",
        *RARE,
    ),
)
def test_block_diffusion_models_are_decoded_with_it(name):
    """Rows do not see each other, and are filled up to their ends."""
    decoder = going_together(causal_blocks=True)[name]
    state = finished(decoder, rows=range(4))
    apart = finished(decoder, rows=(3, 1), slots=4)
    assert texts(apart)[:2] == [texts(state)[3], texts(state)[1]]
    assert set(state.finish.tolist()) == {Finish.LENGTH} and not any(MASK in text for text in texts(state))
