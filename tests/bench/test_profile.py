"""A step's time by part."""

import json

import jax
import pytest

from specjax import cli, models
from specjax.bench import profile
from specjax.bench.prefill import KINDS, Prefill, kind_of
from specjax.bench.step_parts import PARTS, REST, Event, by_part, parts_of
from specjax.models import LlamaLM, llama_config

HLO = """HloModule jit_run_program

%inside (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %mul = f32[2]{0} multiply(%p, %p), metadata={op_name="jit(run_program)/while/body/draft/mul"}
}

%branch (q: f32[2]) -> f32[2] {
  %q = f32[2]{0} parameter(0)
  %copy.1 = f32[2]{0} copy(%q)
  ROOT %fused = f32[2]{0} fusion(%copy.1), kind=kLoop, calls=%inside, metadata={op_name="jit(run_program)/while/body/draft/mul"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %call.1 = f32[2]{0} call(%x), to_apply=%branch, metadata={op_name="jit(run_program)/while/body/target/cond"}
  %save = f32[2]{0} add(%call.1, %x), metadata={op_name="jit(run_program)/while/body/accept/commit/add"}
  %count = f32[2]{0} add(%save, %x), metadata={op_name="jit(run_program)/while/body/accept/add"}
  %plain = f32[2]{0} add(%x, %x)
  %bare = f32[2]{0} fusion(%x), kind=kLoop, calls=%inside
  %read = f32[2]{0} copy(%plain)
  %seen = f32[2]{0} add(%read, %x), metadata={op_name="jit(run_program)/while/body/verify/add"}
  ROOT %out = f32[2]{0} copy(%count)
}
"""


def test_an_operation_is_of_the_part_that_it_was_traced_in_or_of_what_runs_it():
    found = parts_of(HLO)
    wanted = {"call.1": "target", "copy.1": "target", "fused": "draft", "mul": "draft", "save": "commit"}
    wanted |= {"count": REST, "out": REST, "bare": "draft", "read": "verify"}
    assert {name: found[name] for name in wanted} == wanted


def test_a_part_takes_what_its_operations_take_without_those_inside_them():
    parts = {"loop": REST, "a": "target", "b": "draft"}
    thread = [
        Event("a", 10, 20), Event("loop", 0, 100), Event("b", 30, 5), Event("a", 40, 20), Event("a", 70, 30),
    ]  # fmt: skip
    found = by_part([thread, [Event("b", 0, 7)], []], parts)
    assert found == {"draft": 12.0, "target": 60.0, "verify": 0.0, "commit": 0.0, REST: 25.0}


def test_work_of_a_prefill_is_of_the_kind_that_its_source_says():
    source = 'metadata={op_name="jit(insert_program)/layer_0/'
    lines = {
        "product": f'dot(%x, %x), {source}dot_general"}}', "scored": f'dot(%x, %x), {source}tree_attention/dot_general"}}',
        "written": f'add(%x, %x), {source}scatter"}}', "normed": f'multiply(%x, %x), {source}mul"}}', "moved": "copy(%x)",
    }  # fmt: skip
    body = "".join(f"  %{name} = f32[2]{{0}} {rest}\n" for name, rest in lines.items())
    first, last = "  %x = f32[2]{0} parameter(0)\n", "  ROOT %out = f32[2]{0} copy(%x)\n}\n"
    text = f"HloModule m\n\nENTRY %main (x: f32[2]) -> f32[2] {{\n{first}{body}{last}"
    found = parts_of(text, kind_of)
    wanted = {"product": "products", "scored": "attention", "written": "copies", "normed": REST, "moved": "copies"}
    assert {name: found[name] for name in wanted} == wanted


def test_what_interrupts_a_program_does_not_count():
    late = [Event("a", at, 500 if at == 1000 else 10) for at in (0, 1000, 2000)]
    assert by_part([late], {"a": "target"})["target"] == 30.0
    loop = [Event("loop", 0, 1050), *(Event("a", at, 10) for at in (2, 14, 1026, 1038))]
    assert by_part([loop], {"a": "target"})[REST] == 5 * 2


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    lm = LlamaLM(llama_config(64, 32, 48, 2, 4, 2, 8, max_position_embeddings=64, tie_word_embeddings=True))
    models.save(folder / "tiny", lm, lm.init(jax.random.key(0)))
    lines = "".join(json.dumps({"prompt": [1, 2, 3, 1, 2, i]}) + "\n" for i in range(4, 6))
    (folder / "in.jsonl").write_text(lines)
    given = ["--model", str(folder / "tiny"), "--input", str(folder / "in.jsonl"), "--max-new-tokens", "12"]
    return ["bench", "profile", *given, "--batch-size", "2", "--drafter", "prompt_lookup:length=3"]


@pytest.mark.slow
def test_the_command(words, tmp_path, capsys):
    picture = tmp_path / "profile.png"
    assert cli.main([*words, "--json", "--plot", str(picture)]) == 0
    plain, drafted = map(json.loads, capsys.readouterr().out.splitlines())
    for row in (plain, drafted):
        parts = row["parts"]
        assert list(parts) == [*PARTS, REST] and row["batch"] == 2 and 1 <= row["steps"] <= 12
        assert sum(parts.values()) == pytest.approx(row["step_seconds"])
        assert parts["target"] > parts["verify"] and parts["commit"] > 0
        assert row["besides_forwards"] == pytest.approx(1 - parts["target"] / row["step_seconds"])
        read = row["prefill"]
        assert list(read["parts"]) == [*KINDS, REST] and sum(read["parts"].values()) == pytest.approx(read["seconds"])
        assert (read["tokens"], read["columns"]) == (10, 32) and min(read["parts"].values()) > 0
    assert plain["parts"]["draft"] < drafted["parts"]["draft"]
    assert picture.stat().st_size > 1000


def test_a_batch_needs_as_many_prompts(words, capsys):
    assert cli.main([*words[:-4], "--batch-size", "3"]) == 2
    assert "a batch of 3 needs as many prompts, and there are 2" in capsys.readouterr().err


def test_what_a_decoder_took_is_there_as_soon_as_it_has_ended(words, capsys, monkeypatch):
    def measured(name, *rest):
        if name != "none":
            raise RuntimeError("the profiler recorded no operation of the program on this device")
        read = Prefill(10, 32, 0.25, {"products": 0.25})
        return profile.Profile(name, 2, 3, 0.5, {"target": 0.5}, 0.0, read)

    monkeypatch.setattr(profile, "profile", measured)
    with pytest.raises(RuntimeError):
        cli.main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["decoder"] == "none"
