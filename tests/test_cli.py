"""The command line: exit statuses, one-line errors, JSON lines, streams."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from support import cuda_plugin

from specjax import cli, models, terminal
from specjax.models import LlamaLM, llama_config
from specjax.models.gguf.finding import PACKAGES
from specjax.tasks.chat import render

PROMPT = "def add(a, b):"
LIST = "[ hen, dog, deer, olive, mouse, mango, plum, cup, ring, bell, frog, duck ]"
COPY = f"<|user|> Repeat the list. {LIST}<|end|><|assistant|>"
LOOKUP = ["--drafter", "prompt_lookup:length=1"]  # the default drafter's program holds the target's pass four times
FEW = ["--max-new-tokens", "24", *LOOKUP]


def config(vocab=32, limit=64):
    return llama_config(vocab, 16, 24, 1, 2, 1, 8, max_position_embeddings=limit)


def save(folder, seed=0, eos_ids=(), change=lambda params: params, **sizes):
    lm = LlamaLM(config(**sizes))
    params = jax.tree.map(lambda leaf: 4 * leaf, lm.init(jax.random.key(seed)))
    models.save(folder, lm, change(params), eos_ids=eos_ids)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model without a tokenizer."""
    return save(tmp_path_factory.mktemp("models") / "tiny")


def write_lines(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def run(capsys):
    """Runs the command and gives its exit status, stdout and stderr."""

    def go(*argv):
        status = cli.main([str(word) for word in argv])
        return status, *capsys.readouterr()

    return go


@pytest.fixture
def records(run):
    """Runs with `--json` and gives the exit status and the records; nothing else may be on stdout."""

    def go(*argv):
        status, out, _ = run("generate", "--json", *argv)
        return status, [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in out.splitlines()]

    return go


@pytest.fixture
def refused(run):
    """Runs what must fail with status 2, nothing on stdout and one line on stderr, and gives that line."""

    def go(*argv):
        status, out, err = run(*argv)
        assert (status, out) == (2, "")
        assert err.startswith("specjax: error: ") and err.count("\n") == 1 and err.endswith("\n")
        return err

    return go


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a command: generate"),
        (["frobnicate"], "unknown command 'frobnicate'; choose generate"),
        (["convert", "nosuch", "out", "--format", "eagle3"], "unknown head 'nosuch': no such folder"),
        (["convert", "medusa:model=x", "out", "--format", "eagle3"], "a head for medusa cannot be written as eagle3"),
        (["generate", "x", "--drafter", "eagle3:preset=frob"], "has the presets paper and small, not 'frob'"),
        (["bench", "spec", "--input", "missing"], "cannot read the questions 'missing': No such file"),
        (["generate", "x", "--temperature", "abc"], "--temperature: invalid float value: 'abc'"),
        (["generate", "x", "--frob"], "unrecognized arguments: --frob"),
        (["generate", "x", "--temp", "1"], "unrecognized arguments"),
        (["generate", "x", "--seed"], "--seed: expected one argument"),
        (["generate", "x", "--model", "no_such_model"], "unknown model 'no_such_model'"),
        (["generate", "x", "--drafter", "frob"], "unknown drafter 'frob'; choose none"),
        (["generate", "x", "--drafter", "beam"], "'beam' is not a drafter, see `specjax drafters`: give it as decode"),
        (["generate", "x", "--decode", "frob"], "unknown way to decode 'frob'; choose plain"),
        (["generate", "x", "--decode", "beam:frob=1"], "decode 'beam' has no field 'frob'; it has num_beams"),
        (["generate", "x", "--decode", "beam", "--drafter", "none"], "leave drafter out"),
        (["generate", "x", "--decode", "self_agreement", "--json"], "set a temperature, or samples to 1"),
        (["generate", "x", "--sampling", "frob=1"], "--sampling: there is no option 'frob'; see `specjax samplers`"),
        (["generate", "x", "--sampling", "top_h"], "--sampling 'top_h' is not OPTION=VALUE"),
        (["generate", "x", "--sampling", "top_h=a"], "--sampling: top_h must be a number"),
        (["generate", "x", "--drafter", "prompt_lookup:frob=1"], "no field 'frob'"),
        (["generate", "x", "--drafter", "prompt_lookup:length=abc"], "length must be int, got 'abc'"),
        (["generate", "x", "--drafter", "prompt_lookup:length=0"], "length >= 1"),
        (["generate", "x", "--drafter", "prompt_lookup:length"], "is not FIELD=VALUE"),
        (["generate", "x", "--drafter", "none:verifier=frob"], "unknown verifier 'frob'; choose coupled"),
        (["generate", "x" * 20_000], "capacity"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--temperature", "-1"], "temperature must be"),
        (["generate", "x", "--temperature", "nan"], "temperature must be"),
        (["generate", "x", "--top-p", "0"], "top_p must be in (0, 1]"),
        (["generate", "x", "--top-p", "1.5"], "top_p must be in (0, 1]"),
        (["generate", "x", "--sampling", "min_p=2"], "min_p must be"),
        (["generate", "x", "--top-k", "-1"], "top_k must be"),
        (["generate", "x", "--sampling", "repetition_penalty=0"], "repetition_penalty must be"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens must be an integer >= 1"),
        (["generate", "x", "--num-return-sequences", "0"], "--num-return-sequences must be at least 1"),
        (["generate", "x", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["generate", "x", "--dtype", "int4"], "unknown dtype 'int4'"),
        (["generate", "x", "--drafter", "lookahead+prompt_lookup"], "Lookahead adds slots of its own"),
        (["generate", "x", "--mesh", "data=3"], "asks for 3 devices and there are"),
        (["generate", "x", "--mesh", "frob=2"], "mesh 'frob=2'"),
        (["generate", "x", "--strict"], "--strict"),
        (["generate", "x", "--stop", ""], "stop string must not be empty"),
        (["generate", "x", "--input", "in.jsonl"], "PROMPT or --input, not both"),
        (["generate", "--input", "no_such_file.jsonl"], "cannot read the input file 'no_such_file.jsonl'"),
        (["generate", "x", "--output", "no_such_folder/out.jsonl"], "there is no folder 'no_such_folder'"),
        (["generate", "x", "--output", "."], "is a folder"),
        (["bench", "--prompts", "0"], "--prompts must be at least 1"),
        (["bench", "--peer", "frob"], "unknown peer 'frob'"),
        (["bench", "--drafter", "frob"], "unknown drafter 'frob'"),
        (["bench", "--max-new-tokens", "5000"], "lower --max-new-tokens"),
        (["bench", "--plot", "no_such_folder/a.png"], "--plot"),
    ],
)
def test_bad_input_is_one_line_and_status_2(refused, words, said):
    assert said in refused(*words)


def test_model_folders_that_cannot_be_used(refused, tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused("generate", "x", "--model", tmp_path / "empty")

    def broken(name, change):
        folder = save(tmp_path / name)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(change(content)))
        return folder

    folder = broken("other", lambda c: {**c, "architectures": ["FrobForCausalLM"], "model_type": "frob"})
    assert "frob" in refused("generate", "x", "--model", folder).lower()
    folder = broken("deeper", lambda c: {**c, "num_hidden_layers": 2})
    assert "missing model.layers.1." in refused("generate", "x", "--model", folder)
    folder = broken("wider", lambda c: {**c, "intermediate_size": 25})
    assert "model.layers.0.mlp.down_proj.weight has shape" in refused("generate", "x", "--model", folder)
    assert "has no tokenizer" in refused("generate", "x", "--model", tiny)


def test_input_that_cannot_be_used(refused, tiny, tmp_path):
    empty = write_lines(tmp_path / "empty.jsonl", "", "  ")
    assert "has no valid line" in refused("generate", "--input", empty, "--model", tiny)
    bad = write_lines(tmp_path / "bad.jsonl", "{", {"prompt": ""})
    assert "has no valid line; line 1: not valid JSON" in refused("generate", "--input", bad, "--model", tiny)
    outside = write_lines(tmp_path / "outside.jsonl", {"prompt": [99]})
    assert "line 1: prompt id 99 is outside" in refused("generate", "--input", outside, "--model", tiny)
    good = write_lines(tmp_path / "good.jsonl", {"prompt": [1, 2]})
    tiny_input = ["generate", "--input", good, "--model", tiny]
    assert "has no tokenizer, so stop strings" in refused(*tiny_input, "--stop", "x")
    assert "must not be the --input file" in refused(*tiny_input, "--output", good)
    other = save(tmp_path / "other", vocab=40)
    line = refused(*tiny_input, "--drafter", f"draft:model={other}")
    assert "the draft model has 40 tokens and the target 32" in line


def test_no_prompt_at_all(refused, monkeypatch):
    typed = io.TextIOWrapper(io.BytesIO())
    typed.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", typed)
    assert "give PROMPT, --input FILE.jsonl, or text on stdin" in refused("generate")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert "stdin (it is empty)" in refused("generate")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "standard input is not UTF-8 text: invalid start byte at byte 0" in refused("generate")


MIXED = (
    {"prompt": [1, 2, 3], "id": "a", "max_new_tokens": 3},
    "{",
    "",
    {"prompt": [4] * 100, "id": 7},
    {"prompt": [4], "temperature": -1},
    {"prompt": [5, 6], "temperature": 1.0, "seed": 9, "colour": "red"},
)


def test_bad_lines_become_records_in_their_place(run, records, tiny, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", *MIXED)
    out = tmp_path / "out.jsonl"
    words = ["--input", path, "--model", tiny, "--max-new-tokens", 5]
    status, found = records(*words)
    assert status == 1
    assert [(r["line"], r.get("id"), r["finish_reason"]) for r in found] == [
        (1, "a", "length"), (2, None, "error"), (4, 7, "error"), (5, None, "error"), (6, None, "length"),
    ]  # fmt: skip
    assert [len(r["tokens"]) for r in found] == [3, 0, 0, 0, 5] == [r["new_tokens"] for r in found]
    assert "not valid JSON" in found[1]["error"] and "capacity" in found[2]["error"]
    assert "temperature must be" in found[3]["error"]
    for record in found:
        assert {"prompt", "text", "tokens", "finish_reason", "new_tokens", "steps", "tokens_per_step"} <= set(record)
    assert found[0]["prompt"] == [1, 2, 3] and found[0]["text"] is None

    status, stdout, err = run("generate", *words, "--output", out)
    assert (status, stdout) == (1, "")
    assert [json.loads(line) for line in out.read_text().splitlines()] == found
    assert f"specjax: error: {path}, line 2: not valid JSON" in err and "'colour'" in err

    status, stdout, _ = run("generate", *words)  # as text: ids, where there is no tokenizer
    assert status == 1 and stdout.count("==>") == 2 and " ".join(map(str, found[0]["tokens"])) in stdout


def test_strict_stops_before_any_work(refused, tiny, tmp_path):
    path, out = write_lines(tmp_path / "in.jsonl", *MIXED), tmp_path / "out.jsonl"
    line = refused("generate", "--input", path, "--model", tiny, "--strict", "--output", out)
    assert "line 2: not valid JSON" in line and not out.exists()
    path = write_lines(tmp_path / "late.jsonl", {"prompt": [1]}, {"prompt": [77]})
    assert "line 2: prompt id 77" in refused("generate", "--input", path, "--model", tiny, "--strict")


@pytest.mark.slow
def test_a_records_text_does_not_depend_on_its_batch(records, tiny, tmp_path):
    lines = [{"prompt": [n, n + 1], "temperature": 0.5 * n, "seed": n} for n in range(4)]
    path = write_lines(tmp_path / "in.jsonl", *lines)
    words = ["--input", path, "--model", tiny, "--max-new-tokens", 8, "--ignore-eos"]
    _, together = records(*words, *LOOKUP)
    _, alone = records(*words, "--batch-size", 1, "--drafter", "none")
    assert [r["tokens"] for r in together] == [r["tokens"] for r in alone]


@pytest.mark.slow
def test_several_eos_ids(records, tiny, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", {"prompt": [1, 2, 3]})
    words = ["--input", path, "--max-new-tokens", 12, "--temperature", 2, *LOOKUP]
    _, (free,) = records(*words, "--model", tiny)
    tokens = free["tokens"]
    ends = sorted({tokens[3], tokens[6]})
    first = min(tokens.index(token) for token in ends)
    folder = save(tmp_path / "eos", eos_ids=tuple(ends))
    _, (record,) = records(*words, "--model", folder)
    assert (record["finish_reason"], record["tokens"]) == ("eos", tokens[: first + 1])
    _, (record,) = records(*words, "--model", folder, "--ignore-eos")
    assert (record["finish_reason"], record["tokens"]) == ("length", tokens)


@pytest.mark.slow
def test_num_return_sequences(records, tiny, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", {"prompt": [1, 2], "id": "a"}, {"prompt": [3]})
    words = ["--input", path, "--model", tiny, "--max-new-tokens", 8, "--temperature", 1.5]
    words += ["--batch-size", 2, *LOOKUP]
    _, three = records(*words, "--num-return-sequences", 3)
    assert [r["line"] for r in three] == [1, 1, 1, 2, 2, 2]
    assert len({tuple(r["tokens"]) for r in three[:3]}) == 3
    _, one = records(*words)
    assert [r["tokens"] for r in one] == [three[0]["tokens"], three[3]["tokens"]]


@pytest.mark.slow
def test_logprobs(records, tiny, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", {"prompt": [1, 2]})
    _, (record,) = records("--input", path, "--model", tiny, "--max-new-tokens", 8, "--logprobs", *LOOKUP)
    assert len(record["logprobs"]) == len(record["warped_logprobs"]) == 8
    assert all(value <= 0 for value in record["logprobs"])


def test_nan_logits_end_that_row_with_an_error(run, tmp_path):
    def poison(params):
        params["embed"]["embedding"] = params["embed"]["embedding"].at[9].set(jnp.nan)
        return params

    folder = save(tmp_path / "nan", change=poison)
    path = write_lines(tmp_path / "in.jsonl", {"prompt": [1, 2]}, {"prompt": [9, 2]})
    status, out, err = run("generate", "--input", path, "--model", folder, "--max-new-tokens", 4, "--json")
    good, bad = map(json.loads, out.splitlines())
    assert status == 1
    assert (good["finish_reason"], good["new_tokens"]) == ("length", 4)
    assert (bad["finish_reason"], bad["new_tokens"]) == ("error", 0) and "not finite" in bad["error"]
    assert f"specjax: error: {path}, line 2: the model's logits were not finite" in err


@pytest.mark.slow
def test_streamed_text_is_the_records_text(run, records):
    status, (record,) = records(COPY, *FEW)
    assert status == 0 and record["prompt"] == COPY and record["new_tokens"] == 24
    status, out, err = run("generate", COPY, *FEW)
    assert (status, out) == (0, COPY + record["text"] + "\n")
    assert "tokens per step against 1.00 of plain decoding" in err and "drafter prompt_lookup" in err
    status, out, err = run("generate", COPY, *FEW, "--drafter", "none")
    assert (status, out) == (0, COPY + record["text"] + "\n") and "plain decoding" in err


@pytest.mark.slow
def test_stop_strings_across_token_borders(run, records):
    _, (record,) = records(COPY, *FEW)
    tokenizer = models.load("tiny").tokenizer
    border = len(tokenizer.decode(record["tokens"][:10]))
    stop = record["text"][border - 1 : border + 2]
    cut = record["text"].index(stop)
    words = [COPY, *FEW, "--stop", "never written", "--stop", stop]
    _, (stopped,) = records(*words)
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", record["text"][:cut])
    assert stopped["tokens"] == record["tokens"][: stopped["new_tokens"]] and stopped["new_tokens"] < 24
    assert run("generate", *words)[1] == COPY + record["text"][:cut] + "\n"


def test_several_prompts_and_stdin(run, records, monkeypatch, tmp_path):
    _, found = records(PROMPT, "import os\n", *FEW)
    status, out, _ = run("generate", PROMPT, "import os\n", *FEW)
    assert status == 0
    for number, record in enumerate(found, start=1):
        assert f"==> {number}/2 <==\n{record['prompt']}{record['text']}\n" in out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode() + b"\n")))
    assert run("generate", *FEW)[1] == PROMPT + found[0]["text"] + "\n"
    tokenizer = models.load("tiny").tokenizer
    ids = tokenizer.encode(PROMPT + "é")[:-1]  # half of the last character
    path = write_lines(tmp_path / "ids.jsonl", {"prompt": ids})
    _, (record,) = records("--input", path, *FEW)
    whole = tokenizer.decode([*ids, *record["tokens"]], skip_special_tokens=True)
    assert tokenizer.decode(ids) == PROMPT + "\ufffd" and PROMPT + record["text"] == whole
    assert run("generate", "--input", path, *FEW)[1] == whole + "\n"


def test_messages_go_through_the_chat_template(records, tiny, tmp_path):
    messages = [{"role": "user", "content": PROMPT}]
    path = write_lines(tmp_path / "in.jsonl", {"messages": messages}, {"prompt": render(messages)}, {"messages": [{}]})
    status, (chat, plain, bad) = records("--input", path, "--model", "tiny", *FEW)
    assert status == 1 and chat["prompt"] == messages and chat["tokens"] == plain["tokens"]
    assert "every message must be an object with a role" in bad["error"]
    path = write_lines(tmp_path / "ids.jsonl", {"messages": messages}, {"prompt": [1]})
    status, (bad, _) = records("--input", path, "--model", tiny, "--max-new-tokens", 8)
    assert status == 1 and "no tokenizer" in bad["error"]


def test_options_may_stand_between_prompts(records):
    _, found = records(PROMPT, *FEW, "import os\n")
    assert [r["prompt"] for r in found] == [PROMPT, "import os\n"]
    _, found = records(*FEW, "--", "--not-an-option")
    assert found[0]["prompt"] == "--not-an-option"


def fields_of(out):
    """The lines of fields of a list, without those in brackets, which have no value until somebody sets one."""
    rows = [row.strip() for row in out.splitlines() if row.startswith("    ")]
    rows = [re.sub(r",?\[\w+=\.\.\.\]", "", row).replace(":,", ":").rstrip(":").lstrip(",") for row in rows]
    return [row for row in rows if row]


@pytest.mark.parametrize("command", ["drafters", "verifiers", "models"])
def test_lists_are_one_line_each_and_one_of_fields(run, command):
    from specjax.assembly.registry import DRAFTERS, RULES, VERIFIERS, parse

    names = {"drafters": [*DRAFTERS, *RULES], "verifiers": VERIFIERS, "models": [*models.shipped(), *PACKAGES]}[command]
    status, out, err = run(command)
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if not line.startswith(("rule=", "    "))]
    assert [line.split()[0] for line in lines] == list(names)
    assert all(line.endswith("]") for line in lines)
    fields = fields_of(out)
    if command == "drafters":
        of_drafters = [line for line in fields if line.partition(":")[0] in DRAFTERS]
        assert len(of_drafters) >= len(DRAFTERS) - 1 and len(fields) == len(of_drafters) + len(RULES)
        assert all(parse("drafter", DRAFTERS, line) for line in of_drafters)  # each can be given


def test_constraints_are_listed_with_what_they_guarantee(run):
    from specjax.assembly.registry import SEARCHES, WARPERS
    from specjax.constrain.kinds import DISTRIBUTIONS, GUARANTEES, KINDS, PLACES

    status, out, err = run("constraints")
    out, ways = out.split("--decode, or an option in --sampling: how texts are distributed\n")
    lines = [line for line in out.splitlines() if not line.startswith("    ")]
    kinds, said = lines[: len(KINDS)], lines[len(KINDS) :]
    found = {line.split(": ")[0]: line.split(": ")[1].split(", ")[0] for line in ways.splitlines()}
    assert sorted(found.values()) == sorted(DISTRIBUTIONS) and found.pop("all others") == "local"
    assert (found["smc"], found["guide"]) == ("consistent", "guided") and set(found) <= {*SEARCHES, *WARPERS}
    assert (status, err) == (0, "") and [line.split()[0] for line in kinds] == list(KINDS)
    assert [line.partition(":")[0] for line in said] == [*PLACES, *GUARANTEES]
    for line, own in zip(kinds, KINDS.values(), strict=True):
        assert (
            f"  {own.place}" in line and f"  {own.guarantee}  " in line and own.place in PLACES and line.endswith("]")
        )
    assert "    json:FILE, json:{...}\n    keywords of draft 2020-12: type, $ref, allOf," in out


def test_a_head_is_described_by_the_line_that_generate_takes(run, refused):
    words = ["drafters", "--model", "tiny", "--drafter"]
    status, out, err = run(*words, "medusa:verifier=typical")
    assert (status, err) == (0, "") and out == run(*words, "medusa")[1] and json.loads(out)["drafter"] == "medusa"
    assert "unknown drafter 'frob'; choose none" in refused(*words, "frob")


@pytest.mark.parametrize("command", ["samplers", "searches", "policies"])
def test_what_a_list_shows_can_be_given(run, command):
    """Every line of fields."""
    from specjax.assembly import line, registry
    from specjax.decode.lines import DECODES, read_decode
    from specjax.decode.steer import STEERS
    from specjax.serve.sampling import read_sampling

    tables = {"steer": STEERS, "selection": registry.SELECTIONS, "cache": registry.CACHES, "cache of an": registry.OLDS}
    fields = fields_of(run(command)[1])
    assert len(fields) > 10
    for given in fields:
        if command == "samplers" and ":" not in given:
            assert read_sampling([given]), given
            continue
        name = line.read_line(given).name
        table = next((own for own in tables.items() if name in own[1]), None) if name not in DECODES else None
        assert registry.parse(*table, given) if table else read_decode(given), given


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["bench", "--help"], ["--version"]])
def test_help(run, words):
    status, out, err = run(*words)
    assert (status, err) == (0, "") and "specjax" in out


def test_what_ends_a_command_becomes_its_status(capsys):
    def ends(error):
        raise error

    assert terminal.run_command(lambda: ends(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "specjax: interrupted\n"
    before = signal.getsignal(signal.SIGTERM)
    assert terminal.run_command(lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60) or 0) == 143
    assert capsys.readouterr().err == "specjax: ended by SIGTERM\n" and signal.getsignal(signal.SIGTERM) is before
    assert terminal.run_command(lambda: ends(BrokenPipeError())) == 141
    assert terminal.run_command(lambda: ends(terminal.BadInput("two\nlines"))) == 2
    assert capsys.readouterr().err == "specjax: error: two lines\n"


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(tmp_path):
    """With nothing on stderr, also where JAX's CUDA plugin is installed and there is no GPU."""
    words = [sys.executable, "-m", "specjax", "drafters"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        own = cuda_plugin.environment(tmp_path)
        done = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, env=own)
    assert (done.returncode, done.stderr) == (141, "")
