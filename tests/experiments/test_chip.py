"""The run on a chip: who works until when, what is left of it, its page, and its figures of a CPU."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support import chip_parts

from experiments.chip import conduct, cpu, plans, records
from experiments.chip.__main__ import main
from experiments.chip.base import Setting
from experiments.chip.page import Report
from experiments.chip.parts import PARTS, steps, texts, weights
from specjax.plan.rates import rated
from specjax.sharding.aot import CHIPS

PARTS_OF_TESTS = {part.name: part for part in chip_parts.PARTS}
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(conduct.ROOT), str(conduct.ROOT / "tests")]),
    "JAX_PLATFORMS": "cpu",
}
WORKER = (sys.executable, "-m", "support.chip_parts")
DEVICE = {
    "platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "devices": 1, "memory": 80e9, "capability": "9.0", "runtime": "cuda",
    "jax": "0.11.2", "jaxlib": "0.11.2", "python": "3.12", "cores": 16, "date": "2026-01-01",
}  # fmt: skip


def conducted(folder, names, seconds):
    """Runs parts of `support.chip_parts` for so long at most, and returns their records by part."""
    parts = [PARTS_OF_TESTS[name] for name in names]
    run = conduct.Run(folder, parts, time.monotonic() + seconds, True, lambda: None, ENVIRONMENT, WORKER)
    run.go()
    found = records.read(folder)
    return {name: {r["case"]: r for r in records.of_part(found, name)} for name in names}


@pytest.mark.slow
def test_it_has_ended_when_its_minutes_are_over(tmp_path):
    """Though a part sleeps; those before and after it have their time."""
    began = time.monotonic()
    found = conducted(tmp_path, ("quick", "sleeping", "last"), 45)
    assert time.monotonic() - began < 50
    assert {name: list(own) for name, own in found.items()} == {
        "quick": ["one", "two"],
        "sleeping": [],
        "last": ["one"],
    }


@pytest.mark.slow
def test_a_case_that_ends_its_process_or_hangs_is_written_off_and_the_next_one_runs(tmp_path):
    found = conducted(tmp_path, ("stumbling", "hanging", "failing", "shared"), 120)
    assert found["stumbling"]["one"]["error"] == "its process ended with status 7, see log.txt"
    assert found["stumbling"]["two"]["rate"] == 2.0
    assert "no result within 1 s" in found["hanging"]["one"]["error"] and found["hanging"]["two"]["rate"] == 4.0
    assert found["failing"]["one"]["error"] == "ValueError: nothing for one"
    again = conducted(tmp_path, ("stumbling", "shared"), 60)
    assert again["stumbling"] == found["stumbling"] and again["shared"] == found["shared"], (
        "a second run tries nothing again"
    )


@pytest.mark.slow
def test_killed_in_the_middle_it_leaves_what_it_had(tmp_path):
    """Its processes go with it, and the same command goes on."""
    command = [sys.executable, "-c", f"""
import time
from experiments.chip import conduct
from experiments.chip.page import Report
from support.chip_parts import PARTS
from pathlib import Path
import os
folder = Path({str(tmp_path)!r})
parts = [part for part in PARTS if part.name in ("quick", "sleeping")]
report = Report(parts, folder, 5, True)
conduct.Run(folder, parts, time.monotonic() + 300, True, report.write, os.environ, {WORKER!r}).go()
"""]  # fmt: skip
    process = subprocess.Popen(command, cwd=conduct.ROOT, env=ENVIRONMENT, start_new_session=True)
    page = tmp_path / "REHEARSAL.md"
    deadline = time.monotonic() + 120
    while not (page.exists() and "2 of quick" in page.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while _of_session(process.pid):
        assert time.monotonic() < deadline, "its processes are still there"
        time.sleep(0.2)
    assert len(json.loads((tmp_path / "REHEARSAL.json").read_text())["parts"]["quick"]) == 2
    with (tmp_path / records.FILE).open("a") as file:
        file.write('{"part": "last", "ca')  # as a write that was cut off leaves it
    assert list(conducted(tmp_path, ("quick", "last"), 60)["last"]) == ["one"]


def _of_session(leader):
    """The processes of a session that still run."""
    found = subprocess.run(["ps", "-o", "stat=", "-s", str(leader)], capture_output=True, text=True).stdout.split()
    return [state for state in found if not state.startswith("Z")]


def test_a_page_says_what_differs_by_how_much_and_what_was_not_reached(tmp_path):
    place = {"row": 3, "at": 7, "got": [5], "want": [6]}
    told = [
        {"device": DEVICE},
        {"part": "texts", "case": "rounding@", "eps": 1e-6},
        {"part": "texts", "case": "none", "differs": []},
        {"part": "texts", "case": "medusa", "differs": [place | {"gap": 1.5e-6}]},
        {"part": "texts", "case": "eagle3", "differs": [place | {"gap": 0.25}]},
        {"part": "kernels", "case": "cache write; xla; run; float32", "different": 4.0},
        {"part": "rates", "case": "copy", "rate": 3e12},
        {"part": "rates", "case": "read", "rate": 2.5e12},
        {"part": "rates", "case": "launch", "error": "RuntimeError: no"},
        {"part": "attention", "case": "8B, 8 rows, 16 nodes, 4096 slots, bfloat16: Triton", "seconds": 1e-4, "bytes": 1.5e8,
         "layers": 2, "compile_seconds": 3.0},
        {"part": "steps", "case": "8B, 1 nodes, batch 8", "seconds": 0.007, "held_bytes": 2e10, "model_bytes": 16e9},
    ]  # fmt: skip
    for record in told:
        records.append(tmp_path, record)
    page = Report(PARTS, tmp_path, 8.0, False).write()
    text = page.read_text()
    assert page.name == "H100.md" and "NVIDIA H100 80GB HBM3, 80.0 GB, compute capability 9.0" in text
    assert (
        "1 of 3 decoders wrote the CPU's texts, token for token; 1 rows part from it at a near-tie, 1 elsewhere" in text
    )
    assert "| medusa | 3 | 7 | [5] | [6] | 1.50e-06 | near-tie |" in text
    assert "| eagle3 | 3 | 7 | [5] | [6] | 2.50e-01 | **differs** |" in text
    assert "**differs**: cache write; xla; run; float32: 4 numbers" in text
    assert "| 50%, 100.0 us | - | - |" in text, "1.5e8 bytes in 1e-4 s are half of 3e12 a second"
    plan = steps.plans()["h100"]["8B, 1 nodes, batch 8"]
    assert (
        f"| {plan['least'] * 1e3:.2f} to {plan['most'] * 1e3:.2f} | 7.00 | {0.007 / plan['least']:.2f} | 1143 |" in text
    )
    assert "1 without a result: RuntimeError: no (`launch`)" in text and "Not reached: `rounding@experts`" in text
    content = json.loads((tmp_path / "H100.json").read_text())
    assert content["rates"] == {"h100": {"hbm_bandwidth": 2.5e12}} and content["left"]["weights"] > 0


def test_a_section_that_cannot_be_written_loses_nothing(tmp_path):
    records.append(tmp_path, {"device": DEVICE})
    records.append(tmp_path, {"part": "rates", "case": "copy"})
    report = Report(PARTS, tmp_path, 8.0, False)
    assert "This section could not be written: KeyError: 'rate'" in report.write().read_text()


def test_measured_rates_are_what_a_plan_counts_with(tmp_path):
    file = tmp_path / "H100.json"
    file.write_text(json.dumps({"rates": {"h100": {"hbm_bandwidth": 2.5e12, "launch": 3e-6}}}))
    chip = rated(CHIPS["h100"], str(file))
    assert (chip.hbm_bandwidth, chip.launch, chip.flops) == (2.5e12, 3e-6, CHIPS["h100"].flops)
    assert "hbm_bandwidth, launch measured, H100.json" in chip.source
    assert rated(CHIPS["h100"], None) is CHIPS["h100"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no json", "not a file of measured rates"),
        ("{}", "not a file of measured rates"),
        ('{"rates": {"v5e": {"flops": 1.0}}}', "has no rates of a h100; it has v5e"),
        ('{"rates": {"h100": {"flops": -1.0}}}', "flops of h100 must be a number above 0, not -1.0"),
        ('{"rates": {"h100": {"flops": "fast"}}}', "not a file of measured rates"),
    ],
)
def test_a_file_of_rates_that_is_none_is_refused(tmp_path, text, says):
    file = tmp_path / "rates.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        rated(CHIPS["h100"], str(file))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--parts", "texts,tests"), "--parts: unknown 'tests'; there are texts, kernels"),
        (("--minutes", "0"), "--minutes must be above 0"),
    ],
)
def test_a_mistake_is_said_in_a_line(tmp_path, capsys, words, says):
    assert main(["--output", str(tmp_path), *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and says in err


@pytest.mark.parametrize("platform", ("gpu", "tpu", "cpu"))
def test_names_of_cases_are_their_own(platform):
    setting = Setting(platform, "any")
    for part in PARTS:
        cases = list(part.cases(setting))
        assert len(cases) == len(set(cases)) > 4, part.name


@pytest.mark.parametrize("chip", plans.TOPOLOGIES)
def test_there_is_a_plan_for_every_step_that_fits(chip):
    setting = Setting("tpu" if chip.startswith("v") else "gpu", CHIPS[chip].kinds[0])
    asked = {str(step).removesuffix(steps.LOOPED): step for step in [*steps.steps(setting), *weights.steps_of(setting)]}
    known = steps.plans()[chip]
    assert set(known) <= set(asked)
    assert all(0 < plan["least"] <= plan["most"] for plan in known.values())
    missing = set(asked) - set(known)
    if chip in ("h100", "h200"):
        assert missing == set()
    else:
        assert {name.split()[0] for name in missing} <= {"8B"}, "what does not fit"


@pytest.mark.slow
def test_the_figures_of_a_cpu_are_what_it_writes_now():
    known, now = json.loads(texts.FIGURES.read_text()), cpu.figures()
    assert now["shipped"] == known["shipped"]
    for model, own in now["models"].items():
        assert own["texts"] == known["models"][model]["texts"]
        for got, want in zip(own["gaps"], known["models"][model]["gaps"], strict=True):
            assert got == pytest.approx(want, rel=0.01, abs=1e-3)


def test_the_committed_rehearsal_says_that_it_is_one():
    page = (conduct.ROOT / "experiments/chip/REHEARSAL.md").read_text()
    assert "**This is a rehearsal on a CPU.**" in page and "Not reached" not in page and "**differs**" not in page
    assert all(f"## {part.title}" in page for part in PARTS)


@pytest.mark.slow
def test_a_rehearsal_comes_to_every_case_and_finds_nothing_wrong(tmp_path):
    command = [sys.executable, "-m", "experiments.chip", "--rehearse", "--minutes", "10", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=conduct.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "REHEARSAL.md").read_text()
    assert text in done.stdout and "Not reached" not in text and "without a result" not in text
    assert "**differs**" not in text and "decoders wrote the CPU's texts, token for token; 0 rows" in text
