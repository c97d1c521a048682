"""Methods that go step by step, and between two models, as ways to decode: their records are what a direct call wrote."""

import dataclasses

import pytest
from support.conformance import texts as new_tokens
from support.two_models import EOS, LARGE, LETTERS, PROMPTS, SMALL

import specjax
from specjax import Chat, Sampling
from specjax import decoder as decoding
from specjax.decode import AStar, Chops, EntropyAdaptive, Hedged, SelfAgreement, SpecReason, SpeculativeThinking, XMbr
from specjax.models import save
from specjax.search import EntropyAdaptiveDecoder
from specjax.serve.engine import Engine

ASKED = ["".join(LETTERS[token] for token in prompt) for prompt in PROMPTS]
WARM = {"temperature": 1.0, "top_k": 6}
NEW = 12
WAYS = {
    "spec_reason": (
        SpecReason(SMALL, 0.00025, "likelihood", separator="e", step_tokens=6),
        "spec_reason:small={small},threshold=0.00025,score=likelihood,separator=e,step_tokens=6",
    ),
    "astar": (
        AStar(samples=2, budget=6, width=4, separator="e", step_tokens=4),
        "astar:samples=2,budget=6,width=4,separator=e,step_tokens=4",
    ),
    "speculative_thinking": (
        SpeculativeThinking(SMALL, "e", turn=3, help="nlm", begin=4, always=True),
        "speculative_thinking:small={small},trigger=e,turn=3,help=nlm,begin=4,always=true",
    ),
    "self_agreement": (
        SelfAgreement(samples=3, before="n", each="m{answer}", after="l", answer="([a-k])", reply="k{answer}"),
        'self_agreement:samples=3,before=n,each=m{{answer}},after=l,answer="([a-k])",reply=k{{answer}}',
    ),
    "hedged": (Hedged(3, 'majority:answer="([a-k])"'), 'hedged:samples=3,select=(majority:answer="([a-k])")'),
    "chops": (
        Chops(
            3, checklist="n", checklist_tokens=4, before="l{checklist}m", each="m{answer}", after="l", reply="k{number}"
        ),
        "chops:samples=3,checklist=n,checklist_tokens=4,before=l{{checklist}}m,each=m{{answer}},after=l,reply=k{{number}}",
    ),
    "x_mbr": (
        XMbr(3, languages="a|b", foreign=1, ask="n{language}"),
        "x_mbr:samples=3,languages=a|b,foreign=1,ask=n{{language}}",
    ),
}
ENDS = {"budget": "length"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of the small model."""
    folder = tmp_path_factory.mktemp("small") / "small"
    save(folder, SMALL.lm, SMALL.params, eos_ids=EOS)
    return folder


@pytest.mark.parametrize("name", ("spec_reason", *(pytest.param(name, marks=pytest.mark.slow) for name in [*WAYS][1:])))
def test_an_object_and_its_line_write_what_a_direct_call_does(small, name):
    """Completions of a prompt are told apart across the parts that are written side by side."""
    way, line = WAYS[name]
    asked, how = ASKED[:2], {"max_new_tokens": NEW, "seed": 3, "batch_size": 4}
    wanted = way(LARGE, [text for text in asked for _ in range(3)], **how, **WARM)
    how |= {"num_return_sequences": 3, "sampling": Sampling(**WARM), "progress": False}
    for decode in (way, line.format(small=small)):
        records = specjax.generate(LARGE, asked, decode=decode, **how)
        for record, own in zip(records, wanted, strict=True):
            assert (record.text, record.tokens, record.score) == (own.text, own.tokens, own.score)
            assert (record.steps, record.new_tokens) == (own.passes, len(own.tokens))
            assert record.finish_reason == ENDS.get(own.finish_reason, own.finish_reason)
        assert [record.sample for record in records] == [0, 1, 2] * 2
    assert len({tuple(own.tokens) for own in wanted}) > 3 and any(own.passes for own in wanted)
    assert (name != "speculative_thinking") == any(own.score is not None for own in wanted)


@pytest.mark.slow
def test_two_models_that_take_turns(small):
    """At the ends of the threshold either model's text, and between them what the decoder writes."""
    how = {"max_new_tokens": NEW, "seed": 3, "progress": False, **WARM}
    said = lambda model, **decode: [record.tokens for record in specjax.generate(model, ASKED, **decode, **how)]
    for threshold, own in (("0.0", LARGE), ("inf", SMALL)):
        wanted = said(own, drafter="none")
        assert said(LARGE, decode=EntropyAdaptive(SMALL, float(threshold))) == wanted
        assert said(LARGE, decode=f"entropy_adaptive:small={small},threshold={threshold}") == wanted
    way = EntropyAdaptive(SMALL, 2.2, window=3, least=2, block=4)
    decoder = EntropyAdaptiveDecoder(LARGE.lm, SMALL.lm, dataclasses.replace(way, small=None))
    weights, (prompt,) = {"target": LARGE.params, "small": SMALL.params}, PROMPTS[:1]
    state = decoder.init(weights, specjax.Prompts.of([prompt], NEW, seed=3, eos=[EOS], **WARM), capacity=128)
    (wanted,) = new_tokens(decoding.run(decoder, weights, state))
    line = f"entropy_adaptive:small={small},threshold=2.2,window=3,least=2,block=4"
    assert said(LARGE, decode=way)[0] == said(LARGE, decode=line)[0] == wanted


def test_a_stream_has_the_text_at_the_end():
    engine = Engine(LARGE, WAYS["spec_reason"][0])
    (record,) = engine.generate(ASKED[0], max_new_tokens=NEW, temperature=0.0)
    assert list(engine.stream(ASKED[0], max_new_tokens=NEW, temperature=0.0)) == [record.text] and record.text


def test_what_authors_draw_with_is_for_those_who_say_no_temperature():
    engine = Engine(LARGE, WAYS["spec_reason"][0])
    drawn = lambda **options: [getattr(engine.request("abc", **options), name) for name in ("temperature", "top_p")]
    assert drawn() == drawn(temperature=None) == [0.6, 0.95]
    assert drawn(top_p=0.5) == [0.6, 0.5] and drawn(temperature=0.0) == [0.0, 1.0]


REFUSED = (
    ({"mesh": "data=8"}, "goes step by step on one device: leave the mesh out"),
    ({"stop": "b"}, "has texts that end by themselves: leave the stop strings out"),
    ({"logprobs": True}, "carry no log-probabilities: leave logprobs out"),
    ({"logprobs": "prompt"}, "carry no log-probabilities: leave logprobs out"),
    ({"sampling": Sampling(ignore_eos=True)}, "has texts that end by themselves: leave ignore_eos out"),
    ({"chat": Chat(continue_last=True)}, "writes chats by the template alone"),
    ({"prompts": {"prompt": "a", "suffix": "b"}}, "which cannot fill in before a suffix"),
    ({"model": "tiny-diffusion"}, "tiny-diffusion is a diffusion model, which does not write from left to right"),
)


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_they_do_not_go_with(options, said):
    for way, _ in WAYS.values():
        with pytest.raises(ValueError, match=said):
            specjax.generate(**{"model": LARGE, "prompts": "a", "temperature": 1.0, "decode": way, **options})


@pytest.mark.parametrize(("options", "said"), [REFUSED[2], REFUSED[-1]], ids=lambda case: str(case)[:40])
def test_what_two_models_that_take_turns_do_not_go_with(options, said):
    with pytest.raises(ValueError, match=said):
        specjax.generate(**{"model": LARGE, "prompts": "a", "decode": EntropyAdaptive(SMALL), **options})


def test_a_pair_needs_its_small_model():
    for way in (SpecReason(), SpeculativeThinking(), EntropyAdaptive()):
        with pytest.raises(ValueError, match="needs two models: name the small one with small=MODEL"):
            specjax.generate(LARGE, "a", decode=way)
    with pytest.raises(ValueError, match="spec_reason needs two models: name the small one"):
        SpecReason()(LARGE, ["a"])
    with pytest.raises(ValueError, match="prompt by itself: leave the shared prefix out"):
        engine = Engine(LARGE, AStar())
        list(engine.run([engine.request("a", temperature=1.0)], shared_prefix=True))
