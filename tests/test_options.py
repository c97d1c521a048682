"""Options are written once: `generate`, the command line, input lines and the engine agree about them."""

import dataclasses
import inspect
import pickle

import pytest

import specjax
from specjax import flags
from specjax.assembly import registry
from specjax.bench.options import BenchOptions
from specjax.decode import Beam
from specjax.evaluate import EvalOptions
from specjax.jobs import jsonl
from specjax.jobs.options import FileOptions, HostOptions, JobOptions, RayOptions
from specjax.plan.command import PlanOptions
from specjax.sampling import SamplingArrays
from specjax.sampling_params import USUAL, SamplingOptions, form_of
from specjax.serve.engine import Engine
from specjax.serve.options import DecodeOptions, ModelOptions, PromptOptions, RunOptions, take
from specjax.serve.request import Request
from specjax.serve.sampling import check_options
from specjax.terminal import BadInput, Parser, add_fields, flag, from_args
from specjax.warpers import WARPERS

OF_GENERATE = (ModelOptions, DecodeOptions, PromptOptions, RunOptions)
"""What `specjax generate` has in common with `specjax.generate`."""


def defaults_of(cls):
    return {field.name: field.default for field in dataclasses.fields(cls)}


def keywords(function):
    return {name: given.default for name, given in inspect.signature(function).parameters.items() if name != "self"}


def flags_of(cls):
    parser = Parser(prog="x")
    add_fields(parser, cls)
    return {word for action in parser._actions for word in action.option_strings or [action.dest]} - {"-h", "--help"}


def test_generate_has_few_keywords():
    """Those of an engine that is there are among them, and mean the same where they are left out."""
    of_generate, of_engine, of_sampling = (keywords(each) for each in (specjax.generate, Engine, specjax.Sampling))
    assert len(of_generate) <= 20
    known = set(of_generate) - {"model", "prompts"}
    for function in (Engine.generate, Engine.score, Engine.stream):
        own = keywords(function)
        own = {name: value for name, value in own.items() if name in known}
        assert own == {name: of_generate[name] for name in own}, function
    ours = keywords(Engine.generate)
    assert set(ours) - set(of_generate) == {"prompt_logprobs"} and set(of_generate) - set(ours) == {
        "model", "decode", "drafter", "dtype", "mesh", "logprobs",
    }  # fmt: skip
    own = {"rows", "prefix_cache"}  # a cache of prompts outlives a call
    assert set(of_engine) - set(of_generate) == own
    assert {name: of_generate[name] for name in of_engine if name not in own} == {
        name: value for name, value in of_engine.items() if name not in own
    }
    short = set(of_generate) & set(of_sampling)
    assert short == {"temperature", "top_k", "top_p", "seed", "max_new_tokens", "stop", "constraint"}
    assert {of_generate[name] for name in short} == {None}


def test_docstrings_describe_every_keyword():
    for function in (specjax.generate, Engine, specjax.load):
        lines = inspect.getdoc(function).splitlines()
        described = {line.strip().partition(":")[0] for line in lines if line.startswith("  ")}
        assert set(keywords(function)) <= described, function
        assert "**" not in function.__doc__
    with pytest.raises(TypeError, match="frobnicate"):
        specjax.generate(frobnicate=1)


def test_python_and_the_command_line_have_the_same_names_and_defaults():
    """Python's `sampling` takes a `Sampling` or one for each prompt, and the command line lines."""
    table = {name: value for cls in OF_GENERATE for name, value in defaults_of(cls).items()}
    of_generate = keywords(specjax.generate)
    shared = set(of_generate) & set(table)
    assert set(of_generate) - shared == {"prompts", "progress"}
    differ = {name for name in shared if of_generate[name] != table[name]}
    assert differ == {"stop", "sampling", "seed"} and (table["stop"], table["sampling"], table["seed"]) == ((), (), 0)
    of_job = defaults_of(JobOptions)
    assert {name: of_job[name] for name in table} == table
    assert dataclasses.asdict(from_words()) == dataclasses.asdict(JobOptions())
    assert set(keywords(specjax.load)) - set(defaults_of(ModelOptions)) == {"layers", "revision", "config"}
    assert {name: keywords(specjax.load)[name] for name in defaults_of(ModelOptions)} == defaults_of(ModelOptions)


@pytest.mark.parametrize(
    ("command", "cls", "parts"),
    [
        ("generate", JobOptions, (*OF_GENERATE, FileOptions, HostOptions, RayOptions)),
        ("eval", EvalOptions, (ModelOptions, DecodeOptions, PromptOptions)),
    ],
)
def test_flags_come_from_the_classes_of_options(command, cls, parts):
    of_parts = set().union(*(flags_of(part) for part in parts))
    assert set(flags.of_commands()[command]) - {"-h", "--help"} == flags_of(cls) >= of_parts
    own = {field.name for field in dataclasses.fields(cls)} - {name for part in parts for name in defaults_of(part)}
    assert not own or command == "eval"


def from_words(*words):
    parser = Parser(prog="x")
    add_fields(parser, JobOptions)
    args = parser.parse_args(list(words))
    args.words = list(words)
    return from_args(JobOptions, args)


def test_every_field_is_a_flag_of_its_type():
    for cls in (JobOptions, BenchOptions, EvalOptions, PlanOptions):
        fields = [field for field in dataclasses.fields(cls) if not field.metadata.get("hidden")]
        assert flags_of(cls) == {f.name if f.metadata.get("positional") else flag(f.name) for f in fields}
    words = "p --top-k 3 --top-p 0.5 --decode beam:num_beams=4 --stop a --stop b --ignore-eos --ray-workers 2"
    options = from_words(*words.split())
    assert (options.prompts, options.top_k, options.top_p, options.decode) == (("p",), 3, 0.5, "beam:num_beams=4")
    assert (options.stop, options.ignore_eos, options.ray_workers) == (("a", "b"), True, 2)
    assert options.words == tuple(words.split())
    assert options.way == Beam(4)
    with pytest.raises(BadInput, match="--top-k: invalid int value"):
        from_words("--top-k", "1.5")


def test_lines_of_sampling():
    """The later ones on top of the earlier, and flags on top of all, as keywords in Python."""
    lists = from_words(
        "--sampling", 'logit_bias={"3": -100},bad_words_ids=[[1, 2]]', "--sampling", "suppress_tokens=[4],min_p=0.5",
        "--sampling", '{"min_p": 0.25, "ignore_eos": true}', "--temperature", "0.5", "--seed", "3",
    ).of_prompts  # fmt: skip
    assert (lists.logit_bias, lists.bad_words_ids, lists.suppress_tokens) == ({"3": -100}, [[1, 2]], [4])
    assert lists.given == {
        "temperature": 0.5, "logit_bias": {"3": -100}, "bad_words_ids": [[1, 2]], "suppress_tokens": [4], "min_p": 0.25,
        "seed": 3, "ignore_eos": True,
    }  # fmt: skip
    line = "stop=a, b,top_h=0.5,temperature=1,seed=4"
    for more, stop, seed in (((), "a, b", 4), (("--stop", "c", "--temperature", "0.5", "--seed", "2"), "c", 2)):
        found = from_words("--sampling", line, *more).of_prompts
        assert (found.stop, found.top_h, found.seed) == ((stop,), 0.5, seed)
        assert found.temperature == (0.5 if more else 1)
    for line, said in (
        ("suppress_tokens=4,", "suppress_tokens must be a number, true, false or a list, got '4,'"),
        ("suppress_tokens=4", "suppress_tokens must be a list of token ids"),
        ("min_p=2", "min_p must be in"),
        ("top_g=1", "there is no option 'top_g'; did you mean top_p?"),
        ("temp=1", "there is no option 'temp'; it is temperature here"),
        ("[1]", "is not OPTION=VALUE"),
        ('{"min_p": 0.1', "begins as JSON, but is not valid JSON"),
    ):
        with pytest.raises(ValueError) as error:
            _ = from_words("--sampling", line).of_prompts
        assert said in str(error.value)


def test_options_travel():
    options = from_words("p", "--temperature", "0.5", "--stop", "a")
    assert pickle.loads(pickle.dumps(options)) == options
    assert take(PromptOptions, vars(options)) == PromptOptions(temperature=0.5, stop=("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 1


def test_sampling_parameters_are_one_table():
    defaults = defaults_of(SamplingOptions)
    of_user = defaults_of(specjax.Sampling)
    assert {of_user[name] for name in defaults} == {None}  # where he does not say
    assert {name: value for name, value in of_user.items() if name not in defaults} == {
        "max_new_tokens": None, "seed": None, "stop": (), "ignore_eos": False,
    }  # fmt: skip
    assert set(defaults) == {field.name for each in WARPERS for field in dataclasses.fields(each)}
    assert set(defaults) == {name for entry in registry.WARPERS.values() for name in entry.fields}  # all are listed
    assert set(defaults) <= set(of_user) <= {field.name for field in dataclasses.fields(Request)}
    assert set(defaults_of(PromptOptions)) - {"sampling"} <= set(of_user)
    off = SamplingArrays.make(2)
    assert {name: off[name].tolist() for name, _ in USUAL} == {name: [defaults[name]] * 2 for name, _ in USUAL}
    assert off.form == SamplingArrays.blank(2).form == form_of([]) == form_of([SamplingOptions()]) == USUAL


BAD = {
    "temperature": (-1, float("nan"), 1e39, 10**400, "1", True), "top_k": (-1, 1.5, 2**31), "top_p": (0, 1.1, 1e-60),
    "min_p": (-0.1, 2), "repetition_penalty": (0, float("inf")), "max_new_tokens": (0, 2**31, 5.0, True, 10**30),
    "seed": (1.0, "1", True), "typical_p": (0, 1.1), "epsilon_cutoff": (-0.1, 1), "eta_cutoff": (-0.1, 1),
    "top_h": (-0.1, 1.1), "frequency_penalty": (-2.1, 3), "presence_penalty": (float("nan"), 3), "min_length": (-1, 0.5),
    "dry_multiplier": (-1, float("inf")), "dry_base": (0.5,), "dry_allowed_length": (0,), "dry_sequence_breakers": ("\n",),
    "momentum_alpha": (-0.1, float("inf")), "momentum_k": (0, 65, 1.5),
    "mirostat": (3, -1, 0.5), "mirostat_tau": (0, float("inf")), "mirostat_eta": (-0.1, 1.1),
    "xtc_probability": (-0.1, 1.1), "xtc_threshold": (0, 1.1), "xtc_special_tokens": ("\n", [0.5]), "min_new_tokens": (-1,),
    "forced_bos_token_id": (-2, 0.5, [1]), "forced_eos_token_id": (-2, "a"), "begin_suppress_tokens": (5, [-1], [[1]]),
    "suppress_tokens": (5, "a", [-1], [0.5], [[1]]), "bad_words_ids": ([1], [[]], "ab", {"1": 2}),
    "constraint": ("yes", "yaml:a", "json:", 5, ["a"], {"choice": "a"}, {"json": {}, "regex": "a"}),
    "guide": (5, ["a"], {"a": 1}),
    "logit_bias": ([1, 2], {"a": 1}, {"1": "x"}, {"-1": 2}, {"1": float("inf")}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_values_out_of_range(name):
    assert set(BAD) == set(defaults_of(specjax.Sampling)) - {"stop", "ignore_eos"}
    check_options(defaults_of(specjax.Sampling))
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"^{name} must be .*, got ") as error:
            check_options({name: value})
        assert len(str(error.value)) < 120
        with pytest.raises(ValueError, match=f"^{name} must be "):
            specjax.Sampling(**{name: value})
    check_options({"suppress_tokens": [1], "bad_words_ids": [[1, 2], (3,)], "logit_bias": {"1": 2.5, 7: -100}})
    usual = defaults_of(Request)[name]
    line = jsonl.from_object(1, {"prompt": "a", name: usual})
    assert line.error is None and line.options == ({} if usual is None else {name: usual})
