"""`generation_config.json`: what transformers applies is applied, the user's own goes before it, and a line says the rest."""

import json
import logging
import shutil

import jax
import numpy as np
import pytest

import specjax
from specjax import cli, models
from specjax.decode import Beam, Diffusion
from specjax.models import LlamaLM, Masked, ModelError, generation, llama_config
from specjax.search.stepwise import Asked
from specjax.serve.engine import Engine
from specjax.serve.options import PromptOptions
from specjax.serve.request import Request
from specjax.serve.sampling import Sampling

PROMPTS = [[5, 9, 11, 5, 9], [40, 41, 42]]
NEW = 12
QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
GREEDY = {
    "repetition_penalty": 1.4, "suppress_tokens": [17, 30], "bad_words_ids": [[9, 11], [64]], "min_new_tokens": 6,
    "begin_suppress_tokens": [12, 40, 70], "forced_bos_token_id": 8, "forced_eos_token_id": 3,
}  # fmt: skip


@pytest.fixture
def folder(references, tmp_path):
    """A Qwen2 whose `generation_config.json` a test may write."""
    return shutil.copytree(references("qwen2").folder, tmp_path / "own")


def says(folder, **fields):
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def tokens(model, prompts=PROMPTS, **options):
    records = specjax.generate(model, prompts, **{"drafter": "none", "max_new_tokens": NEW, "batch_size": 2, **options})
    return [record.tokens for record in records]


def of_transformers(folder, prompts=PROMPTS, **how):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ask = lambda ids: model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW, pad_token_id=0, **how)
    with torch.no_grad():
        return [ask(ids)[0, len(ids) :].tolist() for ids in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("fields", (GREEDY, QWEN | {"repetition_penalty": 1.4}), ids=("all", "qwen"))
def test_greedy_text_is_that_of_transformers(folder, fields):
    """With a drafter too; the user's own value goes before the folder's, at its default as well, and a prompt's before that."""
    says(folder, eos_token_id=2, **fields)
    model, want = models.load(folder, dtype="float32"), of_transformers(folder)
    assert tokens(model) == want == tokens(model, drafter="prompt_lookup")
    assert want != of_transformers(folder, repetition_penalty=1.0)
    assert tokens(model, sampling=Sampling(repetition_penalty=1.0)) == of_transformers(folder, repetition_penalty=1.0)
    own = [{"prompt": PROMPTS[0], "repetition_penalty": 1.0}, PROMPTS[1]]
    assert tokens(model, own) == [of_transformers(folder, repetition_penalty=1.0)[0], want[1]]


@pytest.mark.slow
def test_drawn_text_has_its_filters(folder):
    """All but the temperature, which is the user's."""
    model = models.load(says(folder, **QWEN | {"repetition_penalty": 1.4, "top_k": 3}), dtype="float32")
    bare = models.load(says(folder), dtype="float32")
    spelled = {"top_k": 3, "top_p": 0.8, "repetition_penalty": 1.4}
    assert tokens(model, temperature=0.9) == tokens(bare, temperature=0.9, sampling=Sampling(**spelled))
    assert tokens(model, temperature=0.9, top_k=0) == tokens(
        bare, temperature=0.9, sampling=Sampling(**spelled | {"top_k": 0})
    )
    assert tokens(model, temperature=0.9) != tokens(bare, temperature=0.9)


def test_where_texts_end(folder):
    """By `generation_config.json` alone, where it says so; then by `config.json`; else by the tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    import transformers

    config = json.loads((folder / "config.json").read_text())
    rewrite = lambda eos: (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
    rewrite(9)
    assert models.load(says(folder, eos_token_id=[4, 7])).eos_ids == (4, 7)
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [4, 7]
    assert models.load(says(folder, bos_token_id=1)).eos_ids == (9,)
    (folder / "generation_config.json").unlink()
    assert models.load(folder).eos_ids == (9,)
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 9
    rewrite(None)
    assert models.load(folder).eos_ids == ()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 2, "</s>": 6}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(
        folder
    )
    assert models.load(folder).eos_ids == (6,)
    assert models.load(says(folder, eos_token_id=4)).eos_ids == (4,)


def test_config_json_counts_where_there_is_no_other_file(folder):
    """As it does for transformers."""
    config = json.loads((folder / "config.json").read_text()) | {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    model = models.load(folder, dtype="float32")
    assert dict(model.generation) == {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
    assert tokens(model) == of_transformers(folder, no_repeat_ngram_size=0)
    assert dict(models.load(says(folder)).generation) == {}


NEUTRAL = {
    "repetition_penalty": 1.0, "top_k": 0, "temperature": 1.0, "do_sample": False, "num_beams": 1, "length_penalty": 1.0,
    "no_repeat_ngram_size": 0, "top_p": None, "use_cache": True, "pad_token_id": 0, "transformers_version": "4.46.0",
    "max_length": 4096, "early_stopping": True,
}  # fmt: skip
LINES = {
    "do_sample=True, temperature=0.7": ({}, QWEN),
    "do_sample=True": ({}, {"do_sample": True, "temperature": 1.0}),
    "no_repeat_ngram_size=3, num_beams=4, length_penalty=2.0": (
        {"temperature": 0.5},
        QWEN | {"no_repeat_ngram_size": 3, "num_beams": 4, "length_penalty": 2.0},
    ),
    "max_new_tokens=2048": ({}, {"max_new_tokens": 2048, "max_length": 30}),
    "length_penalty=2.0": ({"num_beams": 3, "max_new_tokens": 4}, {"num_beams": 2, "length_penalty": 2.0}),
    None: ({"temperature": 0.0, "max_new_tokens": 4}, QWEN | NEUTRAL | {"do_sample": True, "max_new_tokens": 99}),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_says_what_is_not_applied(folder, caplog, line):
    """And nothing of what is, of what the user sets, and of what changes nothing."""
    options, fields = LINES[line]
    beams = options.get("num_beams")
    options = {name: value for name, value in options.items() if name != "num_beams"}
    engine = Engine(models.load(says(folder, **fields), dtype="float32"), beams and Beam(beams))
    left_out = engine.left_out(options, [engine.request(PROMPTS[0], **options)])
    why = "; texts are greedy where no temperature is given" if line and "do_sample" in line else ""
    said = line and f"own: its generation_config.json says {line}, which is not applied{why}"
    assert left_out == said


def test_python_and_the_commands_say_it(folder, caplog, capsys, tmp_path):
    """One line each."""
    says(folder, **QWEN)
    line = "own: its generation_config.json says do_sample=True, temperature=0.7, which is not applied"
    with caplog.at_level(logging.WARNING, "specjax"):
        tokens(models.load(folder, dtype="float32"))
        assert [record.getMessage().partition(";")[0] for record in caplog.records] == [line]
    questions = tmp_path / "prompts.jsonl"
    questions.write_text('{"prompt": [5, 9, 11]}\n{"prompt": [7], "repetition_penalty": 1.0}\n')
    words = ["generate", "--model", str(folder), "--drafter", "none", "--max-new-tokens", "4", "--json"]
    assert cli.main([*words, "--input", str(questions), "--output", str(tmp_path / "out.jsonl")]) == 0
    assert capsys.readouterr().err.count(line) == 1
    manifest = json.loads((tmp_path / "out.jsonl.job.json").read_text())
    assert manifest["sampling"]["repetition_penalty"] == 1.05 and manifest["sampling"]["temperature"] == 0.0
    assert cli.main([*words, "--temperature", "0.7", "--input", str(questions)]) == 0
    assert line not in capsys.readouterr().err


def test_requests_and_options():
    """What is not given is None, and a request has all: the model's, or the default."""
    assert PromptOptions().of_prompts.given == {"seed": 0}
    assert Sampling(repetition_penalty=1.0).given == {"repetition_penalty": 1.0} and Sampling(temperature=0.0).given
    plain = Request([1], (1,))
    assert (plain.max_new_tokens, plain.temperature, plain.repetition_penalty) == (128, 0.0, 1.0)


@pytest.mark.parametrize("fields", ({"repetition_penalty": 0}, {"top_k": -1}, {"top_p": "x"}, {"bad_words_ids": [1]}))
def test_values_that_no_option_has(folder, fields):
    name = next(iter(fields))
    with pytest.raises(ModelError, match=f"generation_config.json: {name} must be .*, got"):
        models.load(says(folder, **fields))


def test_a_diffusion_model_has_what_it_can_have(tmp_path):
    """Filters, but no penalty, which reads the text before a token; it is refused where the user asks for it."""

    lm = LlamaLM(llama_config(32, 16, 24, 2, 2, 1, 8, max_position_embeddings=64))
    models.save(
        tmp_path / "own", lm, lm.init(jax.random.key(0)), diffusion=Masked(23, False), generation=QWEN | {"top_k": 2}
    )
    engine = Engine(models.load(tmp_path / "own", dtype="float32"), decode=Diffusion(block_length=8))
    request = engine.request([5, 6], max_new_tokens=8, temperature=0.7)
    assert (request.top_k, request.top_p, request.repetition_penalty) == (2, 0.8, 1.0)
    assert engine.left_out({"temperature": 0.7}, [request]).endswith(
        "says repetition_penalty=1.05, which is not applied"
    )
    with pytest.raises(ValueError, match="diffusion models have no repetition_penalty"):
        engine.request([5, 6], max_new_tokens=8, repetition_penalty=1.05)


def test_it_is_kept(folder, tmp_path):
    """By a conversion, which writes a folder of the same texts."""
    says(folder, **QWEN | {"eos_token_id": [4, 7], "no_repeat_ngram_size": 3})
    assert cli.main(["convert", str(folder), str(tmp_path / "again"), "--layout", "safetensors"]) == 0
    before, after = models.load(folder), models.load(tmp_path / "again")
    assert after.generation == before.generation == QWEN | {"no_repeat_ngram_size": 3}
    assert after.eos_ids == (4, 7)
    assert generation.defaults(after) == {name: QWEN[name] for name in ("top_p", "top_k", "repetition_penalty")}


def test_searches_step_by_step_have_it(folder):
    """Those of Python alone, whose prompts are no requests of an engine."""
    model = models.load(says(folder, **QWEN), dtype="float32")
    asked = Asked.of([model], PROMPTS, 4, 0, {"temperature": 0.7, "top_k": 5})
    assert asked.sampling == {"top_p": 0.8, "top_k": 5, "repetition_penalty": 1.05, "temperature": 0.7}
    assert np.isclose(asked.sampling_of(1)["repetition_penalty"][0], 1.05)
