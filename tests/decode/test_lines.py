"""A way to decode as a line of text or an object of JSON."""

import pytest

import specjax
from specjax import cli, decode
from specjax.assembly.registry import DRAFTERS, MIXERS, SAMPLERS, SEARCHES, STEPWISE, UNMASKS
from specjax.decode.lines import DECODES, decode_of, read_decode, usual_decode

SAID = {
    # a way by its own name
    "plain": decode.Plain(),
    "plain:cache=window": decode.Plain(cache="window"),
    'plain:steer=(guidance:scale=2,negative_prompt="a, b")': decode.Plain(
        steer='guidance:scale=2,negative_prompt="a, b"'
    ),
    "speculate": decode.Speculate(),
    "speculate:drafter=none,verifier=rejection": decode.Speculate("none", "rejection"),
    "speculate:drafter=(eagle3:taps=1 15 28,model=runs/head)": decode.Speculate("eagle3:taps=1 15 28,model=runs/head"),
    "diffusion:unmask=(credit+threshold:threshold=0.8),ends=never doubted": decode.Diffusion(
        "credit+threshold:threshold=0.8", ends="never doubted"
    ),
    "soft_thinking:mixer=(gumbel:n=4),end_of_think=7": decode.SoftThinking("gumbel:n=4", 7),
    # a method's name, and what is the way's own among its fields
    "none": decode.Speculate("none"),
    "eagle3:taps=1 2 3,verifier=typical,model=runs/head": decode.Speculate(
        "eagle3:taps=1 2 3,model=runs/head", "typical"
    ),
    "prompt_lookup:verifier=(typical:threshold=0.2,alpha=0.1),length=8": decode.Speculate(
        "prompt_lookup:length=8", "typical:threshold=0.2,alpha=0.1"
    ),
    "prompt_lookup:length=8+draft:verifier=rejection,steer=(dola:layers=high)": decode.Speculate(
        "prompt_lookup:length=8+draft", "rejection", "dola:layers=high"
    ),
    'draft:model="runs/a+b, c",steer=(contrastive:amateur="x, (y)",beta=0.2)': decode.Speculate(
        'draft:model="runs/a+b, c"', steer='contrastive:amateur="x, (y)",beta=0.2'
    ),
    "threshold:threshold=0.9,cache=dual,block_length=64": decode.Diffusion("threshold:threshold=0.9", "dual", 64),
    "credit:alpha=0.5+threshold:guidance=1.5,ends=never,shift=true": decode.Diffusion(
        "credit:alpha=0.5+threshold", guidance=1.5, ends="never", shift=True
    ),
    "threshold:sub_block=8,align=prompt_end": decode.Diffusion("threshold", sub_block=8, align="prompt_end"),
    "entropy_renoise": decode.Diffusion("entropy_renoise"),
    "gumbel:n=8,end_of_think=</think>,steer=(guidance:scale=2)": decode.SoftThinking(
        "gumbel:n=8", "</think>", "guidance:scale=2"
    ),
    # searches and pairs
    "beam:num_beams=2,length_penalty=0.8,early_stopping=never": decode.Beam(
        2, length_penalty=0.8, early_stopping="never"
    ),
    "diverse_beam": decode.Beam(4, num_beam_groups=2, diversity_penalty=0.5),
    "stochastic_beam:stochastic_beams=3": decode.StochasticBeam(3),
    "superposed:superposed_drafts=2,superposed_ngrams=tiny-rest": decode.Superposed(2, superposed_ngrams="tiny-rest"),
    "smc:particles=4,resample_below=0.3,weights=awrs": decode.Smc(4, 0.3, "awrs"),
    "asap:samples=50,nodes=64": decode.Asap(50, 64),
    "entropy_adaptive:small=tiny-draft,threshold=0.2": decode.EntropyAdaptive("tiny-draft", 0.2),
    "astar:samples=2,separator=.": decode.AStar(2, separator="."),
    "spec_reason:small=tiny-draft,score=likelihood,drafts=4": decode.SpecReason(
        "tiny-draft", score="likelihood", drafts=4
    ),
    "speculative_thinking:small=tiny-draft,always=true": decode.SpeculativeThinking("tiny-draft", always=True),
    "self_agreement:samples=5": decode.SelfAgreement(5),
    "chops:samples=3,checklist_tokens=64": decode.Chops(3, checklist_tokens=64),
    "x_mbr:languages=French|German,utility=answer": decode.XMbr(languages="French|German", utility="answer"),
    'hedged:samples=3,select=(majority:answer="is (.)")': decode.Hedged(3, 'majority:answer="is (.)"'),
    "verbalized:answers=3": decode.Verbalized(3),
    "e_lang:small=tiny-draft,threshold=12.5": decode.ELang("tiny-draft", 12.5),
    "merged_prompts:merges=20,embedder=runs/merged": decode.MergedPrompts(20, "runs/merged"),
    "plan_search:observations=3,check=pkg.passed": decode.PlanSearch(3, check="pkg.passed"),
    "route:drafters=prompt_lookup:length=8|none,folder=runs/router": decode.Route(
        "prompt_lookup:length=8|none", folder="runs/router"
    ),
    "hide_message:message=tea at 5,size=9": decode.HideMessage("tea at 5", size=9),
    'read_message:text=" and, then",size=3,secret=s': decode.ReadMessage(" and, then", 3, "s"),
    "ralm:documents=own.jsonl,ahead=os3,overlap=true": decode.Ralm("own.jsonl", ahead="os3", overlap=True),
    "ralm:documents=own.jsonl,ahead=2,separator=|": decode.Ralm("own.jsonl", ahead=2, separator="|"),
}


@pytest.mark.parametrize("line", SAID)
def test_a_line_is_the_way_that_it_says(line):
    assert read_decode(line) == SAID[line]


OBJECTS = {
    '{"name": "beam", "num_beams": 2, "early_stopping": true}': decode.Beam(2, early_stopping=True),
    '{"name": "draft", "model": "runs/a+b", "verifier": {"name": "typical", "threshold": 0.3}}': decode.Speculate(
        'draft:model="runs/a+b"', "typical:threshold=0.3"
    ),
    '[{"name": "credit", "alpha": 0.5}, {"name": "threshold", "cache": "dual"}]': decode.Diffusion(
        "credit:alpha=0.5+threshold", "dual"
    ),
    '{"name": "eagle3", "taps": [1, 2], "steer": {"name": "guidance", "negative_prompt": "a, b"}}': decode.Speculate(
        "eagle3:taps=1 2", steer='guidance:negative_prompt="a, b"'
    ),
    '{"name": "diffusion", "unmask": [{"name": "credit"}, {"name": "threshold"}]}': decode.Diffusion(
        "credit+threshold"
    ),
}


@pytest.mark.parametrize("text", OBJECTS)
def test_an_object_of_json_says_the_same(text):
    assert read_decode(text) == OBJECTS[text]


def test_every_name_is_a_way():
    for table, way, field in (
        (DRAFTERS, decode.Speculate, "drafter"),
        ({**UNMASKS, **SAMPLERS}, decode.Diffusion, "unmask"),
        (MIXERS, decode.SoftThinking, "mixer"),
    ):
        for name in table:
            made = read_decode(name)
            assert type(made) is way and getattr(made, field) == name and made == way(**{field: name})
    assert DECODES.keys() >= SEARCHES.keys() | STEPWISE.keys()
    assert all(isinstance(read_decode(name), decode.Decode) for name in DECODES)


def test_no_name_means_two_ways():
    tables = DRAFTERS, UNMASKS, SAMPLERS, MIXERS, DECODES
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))


def test_a_drafter_is_a_way_of_its_own():
    pair = decode.Speculate(("drafter", None)).drafter
    assert decode_of(None, "prompt_lookup:length=8,verifier=rejection") == read_decode(
        "prompt_lookup:length=8,verifier=rejection"
    )
    assert decode_of(None, pair) == decode.Speculate(pair)
    assert decode_of(None, None) is None and decode_of(decode.Beam(2), None) == decode.Beam(2)
    tiny, diffusion = (specjax.load(name) for name in ("tiny", "tiny-diffusion"))
    assert (usual_decode(tiny), usual_decode(diffusion)) == (decode.Speculate(), decode.Diffusion())


WRONG = {
    "beem": "unknown way to decode 'beem'; choose plain, speculate, diffusion, assd, soft_thinking, route, beam, .* a drafter",
    "beam:width=4": "decode 'beam' has no field 'width'; it has num_beams, length_penalty, early_stopping",
    "beam:num_beams": "'num_beams' is not FIELD=VALUE",
    "beam:num_beams=many": "num_beams must be int, got 'many'",
    "beam:early_stopping=perhaps": "early_stopping must be true, false or .never., got 'perhaps'",
    "diffusion:ends=always": "ends takes the words never and doubted, not 'always'",
    "threshold:shift=perhaps": "shift must be true or false, got 'perhaps'",
    "plain:verifier=typical": "decode 'plain' has no field 'verifier'; it has steer, cache",
    "none:steer=(guidance:scale=2": "the parenthesis before .* has no end",
    'draft:model="runs': "the quote before .* has no end",
    "none:verifier=(typical)x": "follows the parenthesis's end",
    '{"name": "beam"': "JSON",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_no_line_is(line):
    with pytest.raises(ValueError, match=WRONG[line]):
        read_decode(line)


WITH_A_MODEL = (
    ("tiny", {"decode": "beam", "drafter": "none"}, "a drafter is a way to decode, and decode names one too"),
    ("tiny", {"drafter": "beam"}, "'beam' is not a drafter, see `specjax drafters`: give it as decode"),
    ("tiny", {"decode": 3}, "decode is a way to decode .* or its line of text, not 3"),
    ("tiny", {"decode": "none:length=8"}, "drafter 'none' has no field 'length'"),
    ("tiny", {"decode": "none:verifier=better"}, "unknown verifier 'better'"),
    ("tiny", {"decode": "none:steer=(guide:scale=2)"}, "unknown steer 'guide'; choose guidance, contrastive, dola"),
    ("tiny", {"decode": "none:steer=(guidance:weight=2)"}, "steer 'guidance' has no field 'weight'"),
    ("tiny", {"decode": "threshold"}, "tiny is an autoregressive model, which has no canvas to unmask"),
    ("tiny-diffusion", {"drafter": "prompt_lookup"}, "a diffusion model, and drafts are verified by an autoregressive"),
    ("tiny-diffusion", {"decode": "plain"}, "a diffusion model, and drafts are verified by an autoregressive"),
    ("tiny-diffusion", {"decode": "threshold:tau=0.9"}, "unmask policy 'threshold' has no field 'tau'"),
    ("tiny-diffusion", {"decode": "threshold:cache=most"}, "unknown cache 'most'"),
)


@pytest.mark.parametrize(("model", "how", "said"), WITH_A_MODEL, ids=str)
def test_what_does_not_go_together(model, how, said):
    with pytest.raises(ValueError, match=said):
        specjax.generate(model, "a", **how)
    if all(isinstance(value, str) for value in how.values()):
        words = [word for name, value in how.items() for word in (f"--{name}", value)]
        assert cli.main(["generate", "--model", model, *words, "a"]) == 2
