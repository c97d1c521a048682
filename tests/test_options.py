"""Options are written once: `generate`, the command line, input lines and the engine agree about them."""

import dataclasses
import inspect
import pickle

import pytest

import specjax
from specjax.assembly import registry
from specjax.bench.options import BenchOptions
from specjax.evaluate import EvalOptions
from specjax.jobs import jsonl
from specjax.jobs.options import JobOptions
from specjax.sampling import SamplingArrays
from specjax.sampling_params import USUAL, SamplingOptions, form_of
from specjax.serve.engine import Engine
from specjax.serve.options import DecodeOptions, PromptOptions, RunOptions, check_options, take
from specjax.serve.request import Request
from specjax.terminal import BadInput, Parser, add_fields, flag, from_args
from specjax.warpers import WARPERS

SHARED = (DecodeOptions, PromptOptions, RunOptions)


def defaults_of(cls):
    return {field.name: field.default for field in dataclasses.fields(cls)}


def keywords(function):
    return {name: given.default for name, given in inspect.signature(function).parameters.items() if name != "self"}


def test_python_and_the_command_line_have_the_same_names_and_defaults():
    table = {name: value for cls in SHARED for name, value in defaults_of(cls).items()}
    assert keywords(specjax.generate) == {**table, "prompts": None, "progress": None}
    assert keywords(Engine) == {**defaults_of(DecodeOptions), "rows": 1}
    of_job = defaults_of(JobOptions)
    assert {name: of_job[name] for name in table} == table
    assert dataclasses.asdict(from_words()) == dataclasses.asdict(JobOptions())


def test_docstrings_describe_every_keyword():
    """As the dataclasses do; the parameters of warpers are described where they are listed."""
    for function in (specjax.generate, Engine):
        described = {line.strip().partition(":")[0] for line in function.__doc__.splitlines() if line.startswith("  ")}
        assert keywords(function).keys() - SamplingOptions.__dataclass_fields__.keys() <= described
        assert "**" not in function.__doc__
    with pytest.raises(TypeError, match="frobnicate"):
        specjax.generate(frobnicate=1)


def from_words(*words):
    parser = Parser(prog="x")
    add_fields(parser, JobOptions)
    args = parser.parse_args(list(words))
    args.words = list(words)
    return from_args(JobOptions, args)


def test_every_field_is_a_flag_of_its_type():
    for cls in (JobOptions, BenchOptions, EvalOptions):
        parser = Parser(prog="x")
        add_fields(parser, cls)
        known = {word for action in parser._actions for word in action.option_strings or [action.dest]}
        fields = [field for field in dataclasses.fields(cls) if not field.metadata.get("hidden")]
        assert known == {"-h", "--help"} | {f.name if f.metadata.get("positional") else flag(f.name) for f in fields}
    words = "p --top-k 3 --min-p 0.5 --block-length 4 --cfg-scale 1.5 --stop a --stop b --ignore-eos --ray-workers 2"
    options = from_words(*words.split())
    assert (options.prompts, options.top_k, options.min_p, options.block_length) == (("p",), 3, 0.5, 4)
    assert (options.cfg_scale, options.stop, options.ignore_eos, options.ray_workers) == (1.5, ("a", "b"), True, 2)
    assert options.words == tuple(words.split())
    lists = from_words("--logit-bias", '{"3": -100}', "--bad-words-ids", "[[1, 2]]", "--suppress-tokens", "[4]")
    assert (lists.logit_bias, lists.bad_words_ids, lists.suppress_tokens) == ({"3": -100}, ([1, 2],), (4,))
    with pytest.raises(BadInput, match="--suppress-tokens: invalid JSON value"):
        from_words("--suppress-tokens", "4,")
    with pytest.raises(BadInput, match="--top-k: invalid int value"):
        from_words("--top-k", "1.5")


def test_options_travel():
    options = from_words("p", "--temperature", "0.5", "--stop", "a")
    assert pickle.loads(pickle.dumps(options)) == options
    assert take(PromptOptions, vars(options)) == PromptOptions(temperature=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 1


def test_sampling_parameters_are_one_table():
    defaults = defaults_of(SamplingOptions)
    assert set(defaults_of(PromptOptions).values()) == {None, 0}  # a user's are None where he does not say
    assert set(defaults) == {field.name for each in WARPERS for field in dataclasses.fields(each)}
    assert set(defaults) == {name for entry in registry.WARPERS.values() for name in entry.fields}  # all are listed
    assert set(defaults) <= set(defaults_of(PromptOptions)) <= {field.name for field in dataclasses.fields(Request)}
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
    "suppress_tokens": (5, "a", [-1], [0.5], [[1]]), "bad_words_ids": ([1], [[]], "ab", {"1": 2}),
    "logit_bias": ([1, 2], {"a": 1}, {"1": "x"}, {"-1": 2}, {"1": float("inf")}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_values_out_of_range(name):
    assert set(BAD) == set(defaults_of(PromptOptions))
    check_options(defaults_of(PromptOptions))
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"^{name} must be .*, got ") as error:
            check_options({name: value})
        assert len(str(error.value)) < 120
    check_options({"suppress_tokens": [1], "bad_words_ids": [[1, 2], (3,)], "logit_bias": {"1": 2.5, 7: -100}})
    usual = defaults_of(Request)[name]
    line = jsonl.from_object(1, {"prompt": "a", name: usual})
    assert line.error is None and line.options == ({} if usual is None else {name: usual})
