"""Any-subset models by the command line, in jobs and in Python: gaps, suffixes, who drafts, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
import tokenizers
import transformers

import specjax
from specjax import cli, models
from specjax.decode import AnyOrder
from specjax.decode.lines import read_decode, usual_decode
from specjax.diffusion import ContextNgram, SelfDraft
from specjax.models import Gaps, Model, xlnet
from specjax.prompts import OPEN, Prompts
from specjax.serve.engine import Engine

MASK = "<|mask|>"
TEXT = f"Repeat the{MASK}. [ hen,{MASK}{MASK} olive ]"
KINDS = ("assd:drafts=1", "assd", "assd:drafter=context_ngram", "assd:drafts=2,rule=rejection")


@pytest.fixture(scope="module")
def words():
    return models.load("tiny").tokenizer


@pytest.fixture(scope="module")
def model(words):
    lm = xlnet.XlnetLM(xlnet.XlnetConfig(len(words.get_vocab()), 16, 1, 2, 24, 8))
    params = jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, jax.jit(lm.init)(jax.random.key(0)))
    return Model(lm, params, words, name="gaps", dtype=jnp.dtype("float32"), masked=Gaps(words.mask_token_id, False))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gaps")
    models.save(path, model.lm, model.params, tokenizer=model.tokenizer, diffusion=model.masked)
    return str(path)


def request(model, prompt, line="assd", **options):
    return Engine(model, decode=line).request(prompt, **options)


def test_its_usual_way_and_lines(model):
    assert usual_decode(model) == AnyOrder() == read_decode("assd")
    decoder, _ = read_decode("assd:drafts=3,drafter=context_ngram,rule=rejection").bind(model)
    assert (decoder.drafts, decoder.drafter, decoder.rule) == (3, ContextNgram(), "rejection")
    assert AnyOrder(drafter=SelfDraft()).bind(model)[0].mask_id == model.masked.mask_id
    assert (model.kind, model.any_subset) == ("an any-subset model", True)


def test_a_text_with_gaps_is_cut_at_its_first_and_its_last(model, words):
    ids = words.encode(TEXT)
    opened = [i for i, token in enumerate(ids) if token == words.mask_token_id]
    assert len(opened) == 3
    for given in (TEXT, [OPEN if i in opened else token for i, token in enumerate(ids)]):
        asked = request(model, given)
        assert (*asked.ids, *asked.gaps, *asked.suffix_ids) == tuple(
            OPEN if i in opened else x for i, x in enumerate(ids)
        )
        assert (
            asked.gaps[0] == asked.gaps[-1] == OPEN
            and asked.max_new_tokens == len(asked.gaps) == opened[-1] - opened[0] + 1
        )
        assert [asked.written(count) for count in (0, 1, len(asked.gaps))] == [0, 1, 3]
    plain = request(model, "Repeat", suffix=" it", max_new_tokens=4)
    assert plain.gaps == () and plain.written(4) == 4


@pytest.mark.slow
@pytest.mark.parametrize("line", KINDS)
def test_a_record_is_what_the_decoder_fills_in(model, words, line):
    """And equals sequential decoding's under the coupled rule; no position is left open, and known tokens stay."""
    ids = words.encode(TEXT)
    engine = Engine(model, decode=line)
    prompts = [{"prompt": TEXT, "temperature": 0.8}, {"prompt": "[ hen,", "suffix": " dog ]", "max_new_tokens": 3}]
    first, second = engine.generate([*prompts], seed=4)
    asked = engine.request(TEXT, temperature=0.8, seed=4)
    assert first.new_tokens == 3 == len(asked.gaps) - sum(token != OPEN for token in asked.gaps)
    known = [(new, old) for new, old in zip(first.tokens, asked.gaps, strict=True) if old != OPEN]
    assert all(new == old for new, old in known) and words.mask_token_id not in first.tokens
    assert first.text == words.decode([*asked.ids, *first.tokens])[len(words.decode(list(asked.ids))) :]
    assert len(second.tokens) == 3 and second.suffix == " dog ]"
    assert first.steps <= 3 and first.tokens_per_step == pytest.approx(3 / first.steps, abs=1e-4)
    # the same row by the decoder alone
    given = [OPEN if token == words.mask_token_id else token for token in ids]
    keys = jax.random.wrap_key_data(jnp.asarray(engine.keys([asked])), impl="threefry2x32")
    alone = dataclasses.replace(Prompts.of([given], max_new_tokens=0, temperature=0.8), keys=keys)
    state = specjax.run(engine.decoder, engine.params, engine.decoder.init(engine.params, alone, capacity=64))
    begin = len(asked.ids)
    assert state.tokens[0, begin : begin + len(asked.gaps)].tolist() == first.tokens
    if "rejection" not in line:
        want = Engine(model, decode="assd:drafts=1").generate([*prompts], seed=4)
        assert [one.tokens for one in (first, second)] == [one.tokens for one in want]


@pytest.mark.slow
def test_the_command_line_and_lines_of_a_job(folder, tmp_path, capsys):
    assert cli.main(["generate", "--model", folder, TEXT]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Repeat the") and said.rstrip().endswith("olive ]") and MASK not in said
    assert cli.main(["generate", "--model", folder, "--suffix", " ]", "--max-new-tokens", "2", "[ hen,"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(" ]")
    lines = [
        {"prompt": TEXT},
        {"prompt": [5, -1, 7]},
        {"prompt": MASK},
        {"prompt": TEXT, "suffix": "x"},
        {"prompt": "[ hen"},
        {"prompt": [-1, 7, 5]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["generate", "--model", folder, "--decode", "assd:drafter=context_ngram", "--max-new-tokens"]
    out = tmp_path / "out.jsonl"
    assert cli.main(["generate", "--model", folder, "--input", str(tmp_path / "in.jsonl"), "--output", str(out)]) in (
        0,
        1,
    )
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["new_tokens"] for one in found[:2]] == [3, 1] and found[0]["prompt"] == TEXT
    assert "one gap" in found[2]["error"] and "leave suffix out" in found[3]["error"] and found[4]["new_tokens"]
    assert found[5]["new_tokens"] == 1 == len(found[5]["tokens"])  # what begins with a gap
    capsys.readouterr()
    assert cli.main([*words, "4", "[ hen"]) == 0
    assert "tokens per pass" in capsys.readouterr().err


REFUSED = {
    "all open": (MASK, {}, "the prompt is one gap"),
    "a limit": (TEXT, {"max_new_tokens": 3}, "leave max_new_tokens out, or the gaps"),
    "a suffix": (TEXT, {"suffix": "x"}, "leave suffix out, or the gaps"),
    "an id": ([5, -1, 99999], {}, "prompt id 99999 is outside the vocabulary"),
    "another negative": ([5, -2], {}, "prompt id -2 is outside"),
    "a penalty": (TEXT, {"repetition_penalty": 1.5}, "any-subset models have no repetition_penalty"),
    "a mask in the suffix": ("[ hen", {"suffix": MASK}, "the suffix holds the mask token"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_prompts_that_cannot_be_used_are_one_line(model, name):
    prompt, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        request(model, prompt, **options)
    assert "\n" not in str(error.value)


def test_a_text_that_goes_on_has_no_ends_of_the_tokenizer(model, words):
    """XLNet's writes `<sep><cls>` after every text."""
    backend = tokenizers.Tokenizer.from_str(words.whole().backend_tokenizer.to_str())
    added = [(token, words.convert_tokens_to_ids(token)) for token in words.all_special_tokens[:2]]
    (first, one), (second, two) = added
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A {second} {first}", special_tokens=[(first, one), (second, two)]
    )
    ending = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, mask_token=words.mask_token)
    model = dataclasses.replace(model, tokenizer=ending)
    own = words.encode("Repeat the", add_special_tokens=False)
    assert ending.encode("Repeat the") == [one, *own, two, one]
    assert list(request(model, "Repeat the", max_new_tokens=3).ids) == [one, *own]


def test_ways_that_do_not_suit_are_one_line(model):
    wrong = {
        "assd:drafter=bigrams": "unknown drafter of assd 'bigrams'; choose context_ngram, self",
        "assd:drafts=0": "assd needs drafts >= 1",
        "assd:rule=greedy": "rule of coupled, rejection",
        "threshold": "gaps is an any-subset model, whose positions read no mask: decode it with assd",
        "prompt_lookup": "gaps is an any-subset model, and drafts are verified by an autoregressive one: decode with .*assd",
        "beam": "gaps is an any-subset model",
        "soft_thinking": "gaps is an any-subset model, and soft thinking",
    }
    for line, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            Engine(model, decode=line)
    with pytest.raises(ValueError, match="is one of context_ngram, self, not 3"):
        AnyOrder(drafter=3).bind(model)
    with pytest.raises(ValueError, match="leave logprobs out"):
        Engine(model, logprobs=True)
    with pytest.raises(ValueError, match="leave the mesh out"):
        AnyOrder().bind(model, mesh=object())
    with pytest.raises(ValueError, match="is an autoregressive model, and assd needs"):
        AnyOrder().bind(models.load("tiny"))
    with pytest.raises(ValueError, match="is a diffusion model, and assd needs"):
        AnyOrder().bind(dataclasses.replace(model, masked=models.Masked(1, False)))
    with pytest.raises(ValueError, match="is not scored"):
        Engine(model).score("a", " b")


def test_it_does_not_draft_as_a_diffusion_model(folder):
    with pytest.raises(ValueError, match="diffuspec drafts with a diffusion model; .* is an any-subset model"):
        Engine("tiny", drafter=f"diffuspec:model={folder}")


def test_no_plan_is_made_for_it(folder, capsys):
    assert cli.main(["plan", "--model", folder, "--topology", "h100:1"]) == 2
    assert "is an any-subset model, for which there is no plan" in capsys.readouterr().err
