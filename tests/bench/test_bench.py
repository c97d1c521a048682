"""The bench on a tiny model: schema, accounting, table and picture. No test rests on a wall time."""

import json
import shutil
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from specjax import cli, models
from specjax.assembly import line
from specjax.bench import command, prompts
from specjax.bench import report as reporting
from specjax.bench.engines import engines_of
from specjax.bench.options import BenchOptions
from specjax.bench.run import Lap, PeerRow, Report, Row, measure, minutes, summarise
from specjax.models import LlamaLM, llama_config
from specjax.tasks import FAMILIES, generate

ROW = ["decoder", "tokens_per_step", "tokens_per_second", "ratio_to_plain", "step_ratio", "identical_text"]
ROW += ["acceptance_by_depth", "mbsu", "type_token_ratio"]
PEER = ["peer", "mode", "tokens_per_second", "identical_text"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Options that choose a tiny model and two prompts of ids."""
    folder = tmp_path_factory.mktemp("bench")
    lm = LlamaLM(llama_config(32, 16, 24, 1, 2, 1, 8, max_position_embeddings=64))
    models.save(folder / "toy", lm, jax.tree.map(lambda leaf: 4 * leaf, lm.init(jax.random.key(0))), eos_ids=(3,))
    (folder / "in.jsonl").write_text('{"prompt": [1, 2, 3, 1, 2]}\n{"prompt": [4, 5]}\n')
    options = ["--model", folder / "toy", "--input", folder / "in.jsonl", "--max-new-tokens", 8]
    return ["bench", *map(str, options)]


@pytest.mark.slow
def test_json_is_the_rows_and_nothing_else(words, capsys):
    assert cli.main([*words, "--json", "--repeats", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    content = json.loads(out)
    assert list(content) == ["rows", "peers"] and content["peers"] == []
    names = [row["decoder"] for row in content["rows"]]
    untrained = [
        "prompt_lookup", "suffix", "sam", "ngram_mod", "iad", "forced", "token_recycling", "aded", "stand", "jacobi",
    ]  # fmt: skip
    assert names == ["none", *untrained, "small_cache", "magicdec", "rapid", "lookahead", "switch"]
    assert "left out draft: the draft model has 1536 tokens and the target 32" in err
    assert "left out medusa: tiny-medusa was trained for the target 'tiny'" in err
    assert "left out swift: " in err  # this target has too few layers
    assert "left out main_experts: main_experts chooses among a model's experts, and this one has none" in err
    for row in content["rows"]:
        assert list(row) == ROW and row["identical_text"] is True and row["tokens_per_second"] > 0
    plain = content["rows"][0]
    assert plain["tokens_per_step"] == plain["ratio_to_plain"] == plain["step_ratio"] == plain["mbsu"] == 1.0
    look_up = content["rows"][1]  # which reads no weights beside the target's
    assert look_up["mbsu"] == pytest.approx(look_up["tokens_per_step"], rel=0.2), "nothing but rows of the table"


@pytest.mark.slow
def test_table_and_picture(words, capsys, tmp_path):
    picture = tmp_path / "a.png"
    assert (
        cli.main([*words, "--drafter", "prompt_lookup:length=3,ngram=2", "--repeats", "1", "--plot", str(picture)]) == 0
    )
    out = capsys.readouterr().out
    assert "prompt_lookup:length=3,ngram=2" in out and "none" in out and "yes" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_peer_has_the_widened_weights_and_the_draft_model(words, capsys):
    tiny = words[words.index("--model") + 1]
    options = [
        "--drafter",
        f"none,draft:model={tiny}",
        "--peer",
        "transformers",
        "--widen",
        "2",
        "--repeats",
        "1",
        "--json",
    ]
    assert cli.main([*words, *options]) == 0
    peers = json.loads(capsys.readouterr().out)["peers"]
    assert [list(peer) for peer in peers] == [PEER] * 3
    assert [(peer["peer"], peer["mode"]) for peer in peers] == [
        ("transformers", mode) for mode in ("greedy", "prompt_lookup", "assisted")
    ]
    assert all(peer["identical_text"] is True for peer in peers)


@pytest.mark.slow
def test_a_peer_samples_and_takes_batches(words, capsys):
    options = ["--drafter", "none", "--peer", "transformers", "--repeats", "1", "--json"]
    assert cli.main([*words, *options, "--batch-size", "2", "--temperature", "1"]) == 0
    (peer,) = json.loads(capsys.readouterr().out)["peers"]
    assert (peer["mode"], peer["identical_text"]) == ("sampled", None) and peer["tokens_per_second"] > 0
    assert cli.main([*words, *options, "--batch-size", "2"]) == 0  # prompts of two lengths
    (peer,) = json.loads(capsys.readouterr().out)["peers"]
    assert (peer["mode"], peer["identical_text"]) == ("greedy", True)


def test_rounds_alternate_after_everyone_is_warm():
    order = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def warm(self):
            order.append("warm " + self.name)

        def lap(self):
            order.append(self.name)
            return Lap([[1]], 1.0)

    advanced = []
    laps = measure({"a": Fake("a"), "b": Fake("b")}, 2, advanced.append)
    assert order == ["warm a", "warm b", "a", "b", "a", "b"] and advanced == list("ababab")
    assert {name: len(own) for name, own in laps.items()} == {"a": 2, "b": 2}


def test_accounting():
    def laps(tokens, seconds, decode, steps):
        return [Lap(tokens, s, d, steps, (1, 2)) for s, d in zip(seconds, decode, strict=True)]

    plain = [[1, 2, 3, 4], [5, 6, 7, 8]]
    report = summarise(
        {
            "none": laps(plain, (4.0, 2.0, 9.0), (1.6, 0.8, 3.6), 8),
            "fast": laps(plain, (1.0, 2.0, 1.0), (1.2, 0.8, 0.4), 4),
            "wrong": laps([[1, 2, 3, 4], [5, 6, 7, 9]], (4.0, 4.0, 4.0), (1.6, 1.6, 1.6), 8),
            "them": laps(plain, (8.0, 8.0, 8.0), (0.0, 0.0, 0.0), 0),
        },
        {"them": ("peer", "greedy")},
        "about",
    )
    assert report.rows[0] == Row("none", 1.0, 2.0, 1.0, 1.0, True, (0.6667,), None, 1.0)
    assert report.rows[1] == Row("fast", 2.0, 8.0, 4.0, 1.0, True, (0.6667,), None, 1.0)
    assert report.rows[2] == Row("wrong", 1.0, 2.0, 1.0, 1.0, False, (0.6667,), None, 1.0)
    assert report.peers == [PeerRow("peer", "greedy", 1.0, True)]
    assert len(report.rows) == 3 and isinstance(report, Report)


@pytest.mark.parametrize("width", (None, 80))
def test_many_depths_leave_the_figures_their_place(width, capsys, monkeypatch):
    """In a file, and on a terminal of some width."""
    if width:
        monkeypatch.setattr(Console, "is_terminal", True)
        monkeypatch.setenv("COLUMNS", str(width))
    shares = tuple(1 - i / 32 for i in range(32))
    reporting.table(Report([Row("threshold/prefix", 3.25, 4321.5, 12.75, 0.5, False, shares, 2.25, 0.5)], [], "about"))
    out = capsys.readouterr().out
    assert all(word in out for word in ("3.25", "2.25", "4321.5", "12.75", "0.50", "no", "1.00", "0.97", "50% are"))
    assert width or "threshold/prefix" in out
    assert "0.78" in out and "..." in out and "0.75" not in out, "eight of them"
    assert width is None or all(len(row) <= width for row in out.splitlines() if row.startswith("│"))


def test_drafters_of_a_comma_list():
    assert line.lines(["none,prompt_lookup:length=8,ngram=3,draft:expander=chain", "none"]) == [
        "none", "prompt_lookup:length=8,ngram=3", "draft:expander=chain",
    ]  # fmt: skip


def test_caches_that_forget_stand_beside_the_whole_one(words):
    of = lambda **more: engines_of(BenchOptions(model=words[2], **more))[0]
    found = of(decode=("prompt_lookup:cache=(ems:chunk=16,budget=32),prompt_lookup:cache=gear",))
    kinds = {name: type(engine.decoder.target.old).__name__ for name, engine in found.items()}
    line, gear = "prompt_lookup:cache=(ems:chunk=16,budget=32)", "prompt_lookup:cache=gear"
    assert kinds == {"none": "NoneType", line: "EMS", gear: "GEAR"} and found[line].drafter == "prompt_lookup"
    with pytest.raises(ValueError, match="unknown cache of an autoregressive model 'prefix'"):
        of(decode=("prompt_lookup:cache=prefix",))


@pytest.mark.slow
def test_widened_decoders_write_the_same_text(words, capsys):
    """The target drafts for itself: nearly all it drafts is accepted, which only a draft widened like it brings about."""
    tiny = words[words.index("--model") + 1]
    options = ["--drafter", f"draft:model={tiny}", "--repeats", "1", "--prompts", "1", "--widen", "2", "--json"]
    assert cli.main([*words, *options]) == 0
    content = json.loads(capsys.readouterr().out)
    assert all(row["identical_text"] for row in content["rows"]) and content["rows"][1]["tokens_per_step"] > 2
    assert 0 < content["rows"][1]["mbsu"] < 1, "a draft model of the target's own size"
    lm = LlamaLM(llama_config(32, 32, 32, 1, 4, 2, 8))
    millions = sum(x.size for x in jax.tree.leaves(lm.abstract())) / 1e6
    assert content["about"].startswith(f"toy widened 2 times: {millions:.1f} M parameters, the text of {tiny}, float32")


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (["--widen", "0"], "--widen must be at least 1, got 0"),
        (["--peer", "frob"], "unknown peer 'frob'; choose transformers"),
        (["order", "--peer", "transformers"], "--peer is not for the suite order"),
        (["order", "--widen", "2"], "--widen is not for the suite order"),
        (["parallel", "--widen", "2"], "--widen is not for the suite parallel"),
    ),
)
def test_what_cannot_be_measured(options, message, capsys):
    assert cli.main(["bench", *options]) != 0
    assert message in capsys.readouterr().err


def plain_texts(words, capsys, *more):
    """The tokens of plain decoding, which all others must have as well."""
    options = ["--drafter", "prompt_lookup", "--peer", "transformers", "--repeats", "1", "--batch-size", "2", *more]
    laps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measure", lambda *given: laps.append(measure(*given)) or laps[-1])
        assert cli.main([*words, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(row["identical_text"] for row in (*report["rows"], *report["peers"]))
    return laps[0]["none"][0].tokens


@pytest.mark.slow
def test_texts_end_at_eos_for_us_and_for_peers(words, capsys, tmp_path):
    whole = plain_texts(words, capsys, "--ignore-eos")
    assert [len(text) for text in whole] == [8, 8]
    shutil.copytree(words[words.index("--model") + 1], tmp_path / "ends")
    (tmp_path / "ends" / "generation_config.json").write_text(json.dumps({"eos_token_id": whole[0][3]}))
    ends = [str(tmp_path / "ends") if word.endswith("/toy") else word for word in words]
    assert plain_texts(ends, capsys)[0] == whole[0][: whole[0].index(whole[0][3]) + 1]
    said = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 1}  # transformers would have both, and has ours
    (tmp_path / "ends" / "generation_config.json").write_text(json.dumps(said))
    assert plain_texts(ends, capsys, "--ignore-eos") != whole


@pytest.mark.parametrize(("chats", "tasks", "families"), [(True, None, 10), (False, "json,edit", 2), (False, None, 0)])
def test_models_that_chat_are_asked_questions(chats, tasks, families):
    model = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="{{ messages }}" if chats else None))
    texts, suffixes = prompts.prompts_of(None, BenchOptions(prompts=12, tasks=tasks), model)
    assert len(texts) == 12 and suffixes == [None] * 12
    if not families:
        assert all(text.startswith(("def ", "class ")) for text in texts)
        return
    names = tasks.split(",") if tasks else list(FAMILIES)
    first = [generate(name, 2, 0, 1)[0].prompt for name in names]
    assert [turn[0]["content"] for turn in texts[:families]] == first and texts[families] != texts[0]


def test_bad_prompts_of_a_bench(words, capsys):
    assert cli.main([*words, "--tasks", "json"]) == 2
    assert "give --tasks or --input, not both" in capsys.readouterr().err
    assert cli.main(["bench", "--tasks", "json,frob"]) == 2
    assert "unknown family 'frob'" in capsys.readouterr().err


def test_without_a_terminal_a_line_a_minute(capsys):
    times = iter([0.0, 10.0, 61.0, 80.0, 130.0, 500.0])
    advance = minutes(5, clock=lambda: next(times))
    for name in ("none", "draft", "medusa", "none", "draft"):
        advance(name)
    assert capsys.readouterr().err == "specjax: bench: 2 of 5, last draft\nspecjax: bench: 4 of 5, last none\n"
