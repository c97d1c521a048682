"""Constraints from a user's words to records: with drafters, in mixed batches, under tight limits, and what is refused."""

import dataclasses
import functools
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from support.constraints import CONFIG, model, vocabulary
from support.operations import check_operations
from support.shapes import changed

from specjax import Sampling, cli
from specjax.constrain import Hmm
from specjax.decode import Plain, Speculate
from specjax.decoder import insert_program, run_program
from specjax.draft import Forced, ModelDrafter, PromptLookup, fuse
from specjax.expand import TopK
from specjax.jobs import jsonl
from specjax.models import LlamaLM
from specjax.serve.engine import Engine
from specjax.verify import Fly, GadPlus, Judge, Lantern

pytest.importorskip("outlines_core")
jsonschema = pytest.importorskip("jsonschema")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age"],
}
KINDS = "json:FILE|SCHEMA, regex:..., choice:a|b, grammar:FILE or nested:FILE"
JSON, CHOICE = {"json": SCHEMA}, "choice:yes|no|perhaps"
PROMPTS = ["Name a person.", [20, 30, 40, 50], "Is it?", "a b a b a b"]
SAMPLINGS = [
    Sampling(constraint=JSON, temperature=1.0, max_new_tokens=40),
    Sampling(constraint="regex:[a-z]{2,5}( [a-z]+)*[.]", temperature=1.0, top_k=50, max_new_tokens=12),
    Sampling(constraint=CHOICE, max_new_tokens=40),
    Sampling(temperature=1.0, max_new_tokens=12),
]


def first_layer():
    lm = LlamaLM(changed(CONFIG, num_hidden_layers=1))
    return ModelDrafter(lm, TopK(k=3, depth=3, nodes=8)), {**model().params, "layers": {0: model().params["layers"][0]}}


def check(records):
    jsonschema.validate(json.loads(records[0].text), SCHEMA)
    assert records[2].text in ("yes", "no", "perhaps") and records[2].finish_reason == "eos"
    assert records[1].text.endswith(".") and records[1].text[:2].isalpha()
    assert not any(record.error for record in records)


@functools.cache
def plain():
    return Engine(model(), drafter="none").generate(PROMPTS, sampling=SAMPLINGS)


def test_a_mixed_batch_obeys():
    check(plain())
    free = Engine(model(), drafter="none").generate(PROMPTS[3:], sampling=SAMPLINGS[3:])
    assert free[0].tokens == plain()[3].tokens


@pytest.mark.parametrize(
    "drafter", ("forced", *(pytest.param(own, marks=pytest.mark.slow) for own in ("lookup", "draft", "both")))
)
def test_the_text_is_that_of_plain_decoding(drafter):
    alone = {"forced": Forced(length=4), "lookup": PromptLookup(length=4)}
    made = (alone[drafter], None) if drafter in alone else first_layer()
    if drafter == "both":
        made = fuse(alone["forced"], made[0], 9), (None, made[1])
    records = Engine(model(), decode=Speculate(made)).generate(PROMPTS, sampling=SAMPLINGS)
    assert [record.tokens for record in records] == [record.tokens for record in plain()]
    assert sum(record.steps for record in records) < sum(record.steps for record in plain())


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    engine = Engine(model(), decode=Speculate((Forced(length=4), None)), mesh="data=4,model=2")
    records = engine.generate(PROMPTS, sampling=SAMPLINGS)
    assert [record.tokens for record in records] == [record.tokens for record in plain()]
    with pytest.raises(ValueError, match="on the host of one device: give nested:..., or leave the mesh out"):
        engine.request("a", constraint={"grammar": 'start: "a"'})


@pytest.mark.slow
@pytest.mark.parametrize("rule", ("rejection", "typical"))
def test_other_rules_obey(rule):
    made = (PromptLookup(length=4), None)
    check(Engine(model(), decode=Speculate(made, rule)).generate(PROMPTS, sampling=SAMPLINGS))


LOOSE = {
    "gad_plus": GadPlus(1536, np.inf), "fly": Fly(0.0, 0), "lantern": Lantern(1535, 1.0),
    "judge": (Judge(0.0), {"kernel": jnp.zeros(16), "bias": jnp.ones(1)}),
}  # fmt: skip
"""Rules with settings at which whatever may be drafted passes."""


@pytest.mark.slow
@pytest.mark.parametrize("rule", LOOSE)
@pytest.mark.parametrize("drafter", ("lookup", "draft"))
def test_rules_that_keep_other_tokens_obey(rule, drafter):
    """The look-up drafts a word, which may be kept, and then a comma, which may not."""
    made = (PromptLookup(length=4), None) if drafter == "lookup" else first_layer()
    engine, pattern = Engine(model(), decode=Speculate(made, LOOSE[rule])), "( [a-z]+)+[.]"
    prompts = ["one two, one two, one", "a word, a word, a", "It is, as it is, as it"]
    for temperature in (0.0, 1.0):
        own = Sampling(constraint=f"regex:{pattern}", temperature=temperature, max_new_tokens=10)
        records = engine.generate(prompts, sampling=own)
        assert all(re.fullmatch(pattern, record.text) and not record.error for record in records)
        if drafter == "lookup":
            first = (" two", " word", " is")
            assert all(record.text.startswith(word) for record, word in zip(records, first, strict=True))


@pytest.mark.slow
def test_options_that_leave_nothing_are_named():
    digits = [token for token, text in enumerate(vocabulary().tokens) if text and text[:1].isdigit()]
    sampling = Sampling(constraint="regex:x[0-9]+", suppress_tokens=digits, max_new_tokens=12)
    record = Engine(model(), drafter="none").generate(PROMPTS[:1], sampling=sampling)[0]
    assert record.text == "x" and record.finish_reason == "error"
    assert record.error.endswith("after 1 new tokens, or suppress_tokens and constraint left no token")


def test_every_text_parses_however_short_its_limit():
    """And another grammar of the same sizes runs in the same program, which calls no host."""
    engine, asked = Engine(model(), drafter="none"), []
    for name in ("name", "nick", "what"):
        properties = {name: {"type": "string", "maxLength": 3}, "age": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": [name]}
        least = int(engine.request("a", constraint={"json": schema}).constraint.distance[0])
        own = Sampling(constraint={"json": schema}, temperature=2.0)
        asked += [own.replace(seed=seed, max_new_tokens=least + 2 * seed) for seed in range(6)]
    records = engine.generate(["a"] * 6, sampling=asked[:6])
    compiled = run_program._cache_size(), insert_program._cache_size()
    records += engine.generate(["a"] * 6, sampling=asked[6:12]) + engine.generate(["a"] * 6, sampling=asked[12:])
    assert (run_program._cache_size(), insert_program._cache_size()) == compiled
    for record, own in zip(records, asked, strict=True):
        jsonschema.validate(json.loads(record.text), own.constraint["json"])
    assert {record.finish_reason for record in records} == {"eos", "length"}
    state = engine.start([engine.request("a", **asked[0].given)])
    check_operations(run_program.trace(engine.decoder, engine.params, state, jnp.int32(9), jnp.int32(1)))


def written(table, state=0, tokens=()):
    """All sequences of tokens that a table allows, with their ends."""
    for token in map(int, np.flatnonzero(table.allowed(state))):
        if token in vocabulary().eos:
            yield [*tokens, token]
        else:
            yield from written(table, table.next(state, token), (*tokens, token))


@pytest.mark.slow
def test_a_beam_search_finds_the_likeliest_text_of_the_language():
    """However the tokens cut it, by the scores of all of them."""
    engine, prompt, choices = (
        Engine(model(), decode="beam:num_beams=24,length_penalty=0"),
        [20, 30, 40],
        "choice:on|off|nor",
    )
    found = engine.generate([prompt], sampling=Sampling(constraint=choices), num_return_sequences=3)
    ways = list(written(engine.request(prompt, constraint=choices).constraint))
    scores = engine.score([prompt] * len(ways), ways)
    ranked = sorted(scores, key=lambda own: -own.logprob)
    assert [own.tokens for own in found] == [own.tokens for own in ranked[:3]] and 3 < len(ways) <= 24
    np.testing.assert_allclose([own.score for own in found], [own.logprob for own in ranked[:3]], rtol=1e-4)


@pytest.mark.parametrize("decode", ("gumbel", "stochastic_beam:stochastic_beams=2", "astar"))
def test_ways_that_do_not_obey_are_refused(decode):
    engine = Engine(model(), decode=decode)
    with pytest.raises(
        ValueError, match="may write tokens that a constraint forbids: leave constraint out, or decode oth"
    ):
        engine.request("a", constraint=CHOICE, temperature=1.0)
    assert engine.request("a", constraint="", temperature=1.0)


@pytest.mark.parametrize("name", ("forced_bos_token_id", "forced_eos_token_id"))
def test_tokens_that_are_forced_are_refused_beside_a_constraint(name):
    engine = Engine(model(), decode=Plain())
    with pytest.raises(ValueError, match=f"{name} forces a token that a constraint may forbid: set it to -1"):
        engine.request("a", constraint=CHOICE, **{name: 3})
    assert engine.request("a", constraint=CHOICE, **{name: -1}) and engine.request("a", **{name: 3})


def test_what_a_model_cannot_do_is_one_line():
    engine = Engine(model(), decode=Plain())
    for options, said in (
        ({"constraint": "yaml:a"}, f"constraint must be {KINDS}, got 'yaml:a'"),
        ({"constraint": JSON, "max_new_tokens": 3}, "and the limit is 3: raise max_new_tokens"),
        ({"constraint": CHOICE, "ignore_eos": True}, "needs a token that ends it"),
        ({"constraint": 'json:{"not": {"pattern": "a"}}'}, "unsupported keyword: not"),
        ({"constraint": 'json:{"not": {}}'}, "the schema allows no value"),
    ):
        with pytest.raises(ValueError) as error:
            engine.request("a", **options)
        assert said in str(error.value) and "\n" not in str(error.value)
    bare = Engine(dataclasses.replace(model(), tokenizer=None), decode=Plain())
    with pytest.raises(ValueError, match="small has no tokenizer, so no constraint"):
        bare.request([1], constraint=CHOICE)


def test_what_a_canvas_cannot_do_is_one_line():
    for decode, options, said in (
        (
            None,
            {"constraint": {"grammar": {"type": "integer"}}},
            "it is a JSON Schema, which json:... follows by a table",
        ),
        (None, {"constraint": JSON, "max_new_tokens": 3}, "and the limit is 3: raise max_new_tokens"),
        (None, {"constraint": JSON, "suffix": " x", "max_new_tokens": 3}, "and the limit is 3: raise max_new_tokens"),
        ("fixed:ends=never", {"constraint": CHOICE}, "needs a token that ends it: give the model one"),
        (None, {"constraint": CHOICE, "ignore_eos": True}, "leave ignore_eos and ends=never out"),
        (None, {"repetition_penalty": 1.5}, "diffusion models have no repetition_penalty"),
    ):
        with pytest.raises(ValueError) as error:
            Engine("tiny-diffusion", decode=decode).request("a", **options)
        assert said in str(error.value) and "\n" not in str(error.value)


CANVASES = (
    ({"prompt": "Name a person.", "constraint": JSON, "max_new_tokens": 40}, None),
    ({"prompt": "How many?", "constraint": "regex:[0-9]{2} (hens|dogs)[.]", "temperature": 0.8}, r"\d\d (hens|dogs)\."),
    ({"prompt": "Steps that repeat: 3, 4, 5,", "suffix": " 9, 10.", "constraint": "regex:( [0-9]+,)+"}, r"( \d+,)+"),
    ({"prompt": "Is it?", "constraint": CHOICE, "max_new_tokens": 2}, "yes|no"),  # the third has more tokens
)


@pytest.mark.slow
def test_a_canvas_from_a_file_and_from_a_flag(tmp_path, capsys):
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"max_new_tokens": 6, **own}) + "\n" for own, _ in CANVASES))
    asked = ["generate", "--model", "tiny-diffusion", "--json"]
    assert cli.main([*asked, "--input", str(file)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    jsonschema.validate(json.loads(found[0]["text"]), SCHEMA)
    for record, (_, pattern) in zip(found[1:], CANVASES[1:], strict=True):
        assert re.fullmatch(pattern, record["text"])
    assert cli.main([*asked, "--constraint", CHOICE, "--max-new-tokens", "8", "Is it?"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] in ("yes", "no", "perhaps")


LINES = ({"prompt": "a", "constraint": {"choice": ["x", "y"]}}, {"prompt": "a"}, {"prompt": "a", "constraint": 5})


def test_flags_and_lines(capsys):
    engine, lines = Engine(model(), decode=Plain()), [jsonl.from_object(i, own) for i, own in enumerate(LINES)]
    found = list(jsonl.to_requests(lines, engine, {"constraint": CHOICE}))
    assert [getattr(own, "constraint", own).line for own in found[:2]] == ['choice:["x", "y"]', CHOICE]
    assert found[2].error == f"constraint must be {KINDS}, got 5"
    assert cli.main(["generate", "--constraint", "choice:", "a"]) != 0
    assert "constraint must be json:FILE" in capsys.readouterr().err


def test_a_guide_is_made_with_a_request_or_refused_in_one_line(tmp_path):
    hmm = Hmm.of("even", np.full(2, 0.5), np.full((2, 2), 0.5), np.full((2, 1536), 1 / 1536))
    engine = Engine(model(), drafter="none")
    hmm.save(tmp_path)
    asked = {"constraint": "choice:yes|no", "temperature": 1.0}
    found = engine.request([1, 2], guide=str(tmp_path), **asked)
    assert found.guide == engine.request([1, 2], guide=hmm, **asked).guide and len(found.guide.kinds) < 12
    grammar = {"grammar": 'start: "a" | "b"'}
    with pytest.raises(ValueError, match="a grammar has no table, so nothing can guide to it: leave guide out$"):
        engine.request([1, 2], guide=hmm, constraint=grammar)
    with pytest.raises(ValueError, match="^a guide leads to texts of a constraint"):
        engine.request([1, 2], guide=hmm)
    with pytest.raises(
        ValueError, match="^sequential Monte Carlo weighs the texts of a constraint itself: leave guide"
    ):
        Engine(model(), decode="smc").request([1, 2], guide=hmm, **asked)
