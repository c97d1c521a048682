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
from specjax.decode.lines import read_decode
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays
from specjax.serve.engine import Engine
from specjax.serve.options import option
from specjax.serve.sampling import Sampling
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
    "run, of a request": (
        lambda: Engine.run(object(), [], stop=["a"]),
        "Engine.run() has no keyword 'stop': a request has it, such as Engine.request(..., stop=...)",
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
    "rollout": (
        lambda: specjax.rollout(None, {}, None, num_generations=4),
        "rollout() has no keyword 'num_generations': see help(rollout)",
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
    ours = {
        *inspect.signature(specjax.generate).parameters,
        *Sampling.__dataclass_fields__,
        "target",
        "input",
        "output",
    }
    ours |= {*inspect.signature(specjax.load).parameters}
    assert {meant for meant, _ in (names.MEANT | names.WITHIN).values()} <= ours
    assert not names.MEANT.keys() & {*inspect.signature(specjax.generate).parameters}
    asked = (
        "max_tokens max_length n do_sample assistant_model speculative_model num_speculative_tokens prompt_lookup_num_tokens "
        "draft_model tensor_parallel_size torch_dtype model_path n_predict tp_size num_draft_tokens max_model_len"
    )
    assert set(asked.split()) <= names.MEANT.keys()
    shown = {flag.lstrip("-").replace("-", "_"): flag for flag in flags.of_commands()["generate"]}
    assert names.hint("--tensor-parallel-size", shown) == "it is --mesh here, such as model=2"
    assert names.hint("--num-return-sequence", shown) == "did you mean --num-return-sequences?"
    assert (
        names.hint("--repeat-penalty", shown) == "it is in --sampling here, such as --sampling repetition_penalty=..."
    )


LOADING = ("adapter", "longest", "weights", "cache_dtype", "reduce_dtype")
OF_DECODE = {
    "unmask": "threshold:threshold=0.9", "cache": "threshold:cache=dual", "block_length": "diffusion:block_length=...",
    "cfg_scale": "diffusion:guidance=1.5", "sub_block": "diffusion:sub_block=...", "align": "diffusion:align=...",
    "shift": "diffusion:shift=...", "filter": "learn2pd:model=FOLDER", "logits_eos_inf": "diffusion:ends=never",
    "confidence_eos_eot_inf": "diffusion:ends=doubted", "num_beams": "beam:num_beams=4",
    "num_beam_groups": "diverse_beam:num_beam_groups=...", "diversity_penalty": "diverse_beam:diversity_penalty=...",
    "length_penalty": "beam:num_beams=4,length_penalty=...", "early_stopping": "beam:num_beams=4,early_stopping=...",
    "guidance_scale": "plain:steer=(guidance:scale=1.5)",
    "negative_prompt": 'plain:steer=(guidance:negative_prompt="TEXT")',
    "amateur": "plain:steer=(contrastive:amateur=MODEL)",
    "contrast_alpha": "plain:steer=(contrastive:amateur=MODEL,alpha=0.1)",
    "contrast_beta": "plain:steer=(contrastive:amateur=MODEL,beta=0.5)", "dola_layers": "plain:steer=(dola:layers=low)",
    "stochastic_beams": "stochastic_beam:stochastic_beams=4", "superposed_drafts": "superposed:superposed_drafts=...",
    "superposed_tokens": "superposed:superposed_tokens=...", "superposed_temperature": "superposed:superposed_temperature=...",
    "superposed_alpha": "superposed:superposed_alpha=...", "superposed_ngrams": "superposed:superposed_ngrams=...",
    "soft_thinking": "gumbel:n=8", "end_of_think": "gumbel:end_of_think=</think>",
}  # fmt: skip
OF_PROMPTS = (
    "min_p repetition_penalty logit_bias frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length "
    "dry_sequence_breakers bad_words_ids min_length min_new_tokens suppress_tokens momentum_alpha momentum_k mirostat "
    "mirostat_tau mirostat_eta top_h typical_p epsilon_cutoff eta_cutoff xtc_probability xtc_threshold xtc_special_tokens"
).split()
KEPT = (
    "drafter logprobs dtype mesh temperature top_k top_p max_new_tokens seed chat num_return_sequences select stop batch_size"
).split()
OF_ALL = {
    "verifier": "it is in drafter here, such as eagle3:verifier=typical",
    "logits_processors": "it is in decode here, such as specjax.decode.Speculate(processors=(...,))",
    **{name: f"it is in decode here, such as {line}" for name, line in OF_DECODE.items()},
    **{name: f"it is in model here, such as specjax.load(..., {name}=...)" for name in LOADING},
}
MOVED = {
    **OF_ALL,
    **{name: f"it is in sampling here, such as Sampling({name}=...)" for name in (*OF_PROMPTS, "ignore_eos")},
    "suffix": 'it is in prompts here, such as {"prompt": ..., "suffix": ...}',
    "answer": "it is in select here, such as majority:answer=REGEX",
    "shared_prefix": "Engine.run(shared_prefix=True) has it, and the command `specjax generate`",
    "prompt_logprobs": 'it is in logprobs here, as logprobs="prompt"',
}
"""Options that `generate` had as keywords of their own: what is said of each."""
MOVED_FLAGS = {
    "--verifier": "it is in --drafter here, such as eagle3:verifier=typical",
    "--answer": "it is in --select here, such as majority:answer=REGEX",
    **{f"--{name}": f"it is in --decode here, such as {line}" for name, line in OF_DECODE.items()},
    **{f"--{name}": f"it is in --sampling here, such as --sampling {name}=..." for name in OF_PROMPTS},
}


def test_an_option_that_has_moved_is_found():
    """Every keyword that `generate` and `Engine` had, and every flag, is there or says where it is; no model is loaded."""
    assert len({*KEPT, *MOVED}) == len(KEPT) + len(MOVED) == 80
    assert {*KEPT} <= {*inspect.signature(specjax.generate).parameters}
    for function, moved in ((specjax.generate, MOVED), (Engine, OF_ALL)):
        for name, said in moved.items():
            with pytest.raises(TypeError) as error:
                function("nowhere", **{name: None})
            assert str(error.value) == f"{function.__name__}() has no keyword {name!r}: {said}"
    for command in ("generate", "eval"):
        for name, said in MOVED_FLAGS.items():
            flag = name.replace("_", "-")
            found = names.wrong_word([command, flag, "1"], flags.of_commands())
            assert found == f"unrecognized arguments: {flag}: {said} (see specjax {command} --help)"
    kept = {f"--{name.replace('_', '-')}" for name in {*KEPT, *MOVED} - {"logits_processors"}}
    assert kept - {name.replace("_", "-") for name in MOVED_FLAGS} <= {*flags.of_commands()["generate"]}


@pytest.mark.parametrize("name", OF_DECODE)
def test_what_is_said_of_a_moved_option_can_be_given(name):
    """As it stands, where it has no places to fill in."""
    example = OF_DECODE[name]
    if "..." in example:
        field = example.rpartition(",")[2].rpartition(":")[2].removesuffix("=...")
        made = read_decode(example.partition(f"{field}=")[0].rstrip(":,"))
        assert field == name and field in {own.name for own in dataclasses.fields(made)}
    else:
        read_decode(example)


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
