"""A name that is not there is answered with the one that was meant; on a command line before jax comes in."""

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specjax
from specjax import decoder, flags, models, names
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays
from specjax.serve.engine import Engine
from specjax.serve.options import option
from specjax.terminal import BadInput, Parser, add_fields

ROOT = str(Path(__file__).parents[1])
WRONG = {
    "generate": (
        lambda: specjax.generate(max_tokens=5),
        "generate() has no keyword 'max_tokens': it is max_new_tokens here",
    ),
    "Engine": (
        lambda: Engine("tiny", assistant_model="x"),
        "Engine() has no keyword 'assistant_model': it is drafter here, such as draft:model=FOLDER",
    ),
    "Engine.request": (
        lambda: Engine.request(object(), "a", do_sample=True),
        "Engine.request() has no keyword 'do_sample': it is temperature here, and 0 is greedy",
    ),
    "Engine.run": (
        lambda: Engine.run(object(), [], max_num_seqs=2),
        "Engine.run() has no keyword 'max_num_seqs': it is batch_size here",
    ),
    "score": (lambda: specjax.score(torch_dtype="float32"), "score() has no keyword 'torch_dtype': it is dtype here"),
    "load": (
        lambda: models.load(pretrained_model_name_or_path="x"),
        "load() has no keyword 'pretrained_model_name_or_path': it is model here",
    ),
    "save": (lambda: models.save(generatoin=1), "save() has no keyword 'generatoin': did you mean generation?"),
    "speculative": (
        lambda: specjax.speculative(None, draft_model=1),
        "speculative() has no keyword 'draft_model': it is drafter here, such as draft:model=FOLDER",
    ),
    "run": (
        lambda: specjax.run(None, {}, None, max_step=4),
        "run() has no keyword 'max_step': did you mean max_steps?",
    ),
    "stream": (
        lambda: specjax.stream(None, {}, None, step_per_call=4),
        "stream() has no keyword 'step_per_call': did you mean steps_per_call?",
    ),
    "init": (
        lambda: decoder.Decoder.init(None, {}, None, capacitiy=1),
        "Decoder.init() has no keyword 'capacitiy': did you mean capacity?",
    ),
    "Prompts.of": (
        lambda: Prompts.of([[1]], 4, temp=1.0),
        "Prompts.of() has no keyword 'temp': it is temperature here",
    ),
    "SamplingArrays.make": (
        lambda: SamplingArrays.make(2, repeat_penalty=1.1),
        "SamplingArrays.make() has no keyword 'repeat_penalty': it is repetition_penalty here",
    ),
    "nothing near": (
        lambda: specjax.generate(frobnicate=1),
        "generate() has no keyword 'frobnicate': see help(generate)",
    ),
}


@pytest.mark.parametrize("door", WRONG)
def test_a_keyword_of_another_system(door):
    call, said = WRONG[door]
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value) == said


def test_a_name_is_translated_to_one_that_there_is():
    ours = {*inspect.signature(specjax.generate).parameters, "target", "input", "output"}
    assert {meant for meant, _ in names.MEANT.values()} <= ours
    assert not names.MEANT.keys() & {*inspect.signature(specjax.generate).parameters}
    asked = (
        "max_tokens max_length n do_sample assistant_model speculative_model num_speculative_tokens prompt_lookup_num_tokens "
        "draft_model tensor_parallel_size torch_dtype model_path n_predict tp_size num_draft_tokens max_model_len"
    )
    assert set(asked.split()) <= names.MEANT.keys()
    shown = {flag.lstrip("-").replace("-", "_"): flag for flag in flags.of_commands()["generate"]}
    assert names.hint("--tensor-parallel-size", shown) == "it is --mesh here, such as model=2"
    assert names.hint("--num-return-sequence", shown) == "did you mean --num-return-sequences?"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "generate|x|--max-tokens|5",
            "unrecognized arguments: --max-tokens: it is --max-new-tokens here (see specjax gen",
        ),
        ("generate|x|--max-tokens=5", "unrecognized arguments: --max-tokens: it is --max-new-tokens here"),
        ("generate|-p|x", "unrecognized arguments: -p: it is the argument prompts here"),
        (
            "plan|train|--tp|2",
            "unrecognized arguments: --tp: it is --mesh here, such as model=2 (see specjax plan train",
        ),
        ("generat|x", "unknown command 'generat'; did you mean generate? (see specjax --help)"),
        ("generate|--temperature|-1|--seed=-2|--a sentence|-|-.5|--|--max-tokens", None),
        ("generate|--help|--max-tokens", None),
        ("--max-tokens", None),
        ("", None),
    ],
)
def test_the_words_of_a_command(line, said):
    found = names.wrong_word(line.split("|") if line else [], flags.of_commands())
    assert found is None if said is None else found.startswith(said)


def test_other_programs_answer_likewise():
    options = dataclasses.make_dataclass("Options", [("batch_size", int, option(8, "rows"))])
    parser = Parser(prog="x")
    add_fields(parser, options)
    with pytest.raises(BadInput) as error:
        parser.parse_args(["--max-num-seqs", "3"])
    assert str(error.value) == "unrecognized arguments: --max-num-seqs: it is --batch-size here (see x --help)"


@pytest.mark.parametrize("started", ["module", "script", "another module", "another script"])
def test_a_command_answers_before_jax_comes_in(tmp_path, started):
    """And the words of another program are its own."""
    (tmp_path / "jax.py").write_text("raise SystemExit('jax came in')")
    program = tmp_path / {"script": "specjax", "another script": "other"}.get(started, "another_module.py")
    program.write_text("import specjax")
    word = ["-m", "specjax"] if started == "module" else ["-m", program.stem]
    word = word if "module" in started else [str(program)]
    # as pip's script does, which lies in another folder than the package
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONSAFEPATH": "1"}
    words = [sys.executable, *word, "generate", "x", "--max-tokens", "5"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=tmp_path)
    if "another" in started:
        assert (done.returncode, done.stderr) == (1, "jax came in\n")
    else:
        said = "unrecognized arguments: --max-tokens: it is --max-new-tokens here (see specjax generate --help)"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"specjax: error: {said}\n")
