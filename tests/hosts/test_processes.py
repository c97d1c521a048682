"""One job in two processes: the bytes of one process, whatever becomes of the other."""

import json
import signal

import pytest
from support import processes
from support.processes import end, pair, wait_for_records

from specjax import cli
from specjax.models import Masked

pytestmark = pytest.mark.slow
MESH = ("--mesh", "data=2,model=2")
COUNT = 24


class Case:
    """An input, and the output of one process."""

    def __init__(self, folder, model, *words, count=COUNT, prompts=None):
        self.folder, self.words = folder, ["--model", model, "--batch-size", 2, *words]
        self.input = processes.write_input(folder / "in.jsonl", count)
        if prompts:
            lines = [{"prompt": p, "temperature": float(i % 2), "id": f"n{i}"} for i, p in enumerate(prompts)]
            self.input.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.status = cli.main(["generate", *map(str, self.options(folder / "one.jsonl"))])
        self.whole = (folder / "one.jsonl").read_bytes()

    def options(self, output, *more):
        return [*self.words, "--input", self.input, "--output", output, *more]

    def two(self, name):
        """Both processes to their end; their statuses and the output."""
        output = self.folder / name
        with pair(*self.options(output, *MESH)) as both:
            ended = [end(process) for process in both]
        assert ended[1][1:] == ("", "") and ended[0][1] == "", ended  # one of them speaks
        return [status for status, _, _ in ended], output.read_bytes()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return Case(folder, processes.save(folder / "model"), *processes.LOOKUP)


def test_two_processes_write_what_one_writes(tmp_path):
    """The shipped target with a trained head, greedy and sampled, with stop strings."""
    lists = [
        "hen, dog, deer, olive, mouse",
        "plum, cup, ring, bell, frog, duck, hen, dog, cow",
        "cup, deer",
        "ring, bell",
        "dog",
    ]
    prompts = [f"<|user|> Repeat the list. [ {words} ]<|end|><|assistant|>" for words in lists]
    words = ("--drafter", "medusa", "--max-new-tokens", 16, "--stop", "deer")
    case = Case(tmp_path, "tiny", *words, prompts=prompts)
    records = [json.loads(line) for line in case.whole.splitlines()]
    assert case.status == 0 and {"stop", "length"} <= {record["finish_reason"] for record in records}
    assert case.two("two.jsonl") == ([0, 0], case.whole)


def test_two_processes_of_a_diffusion_model(tmp_path):
    model = processes.save(tmp_path / "model", Masked(23, False))
    case = Case(tmp_path, model, "--decode", "threshold:threshold=0.4,block_length=4", count=7)
    assert case.two("two.jsonl") == ([1, 1], case.whole)  # 1: the input has a bad line


@pytest.mark.parametrize("dead", (0, 1))
def test_a_dead_process_ends_the_other_and_the_job_goes_on(case, dead):
    output = case.folder / f"killed{dead}.jsonl"
    with pair(*case.options(output, *MESH)) as both:
        wait_for_records(output, both[0])
        both[dead].send_signal(signal.SIGKILL)
        status, out, err = end(both[1 - dead], processes.PATIENCE)
    assert status == 3 and out == "", err
    assert err.count("\n") == 1 and f"process {dead}" in err and f"{output} keeps every record" in err
    kept = output.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert case.whole.startswith(kept) and 0 < len(kept) < len(case.whole)
    if dead == 0:
        ended, whole = case.two(output.name)
        assert (ended, whole) == ([1, 1], case.whole)
    else:  # fewer processes, another mesh
        status, _, err = end(processes.start(*case.options(output, "--mesh", "model=2")))
        assert status == 1 and "records are in" in err and output.read_bytes() == case.whole


def test_a_signal_to_any_process_ends_the_job(case):
    """SIGTERM; Ctrl-C goes the same way."""
    output = case.folder / "interrupted.jsonl"
    with pair(*case.options(output, *MESH)) as both:
        wait_for_records(output, both[0])
        both[1].send_signal(signal.SIGTERM)
        first, second = [end(process) for process in both]
    kept = output.read_bytes()
    assert first[0] == second[0] == 143 and case.whole.startswith(kept) and len(kept) < len(case.whole)
    assert f"ended by SIGTERM; {output} holds {kept.count(10)} of {COUNT} records" in first[2] and second[2] == ""


def test_processes_that_were_given_different_things(case, tmp_path):
    own = (("--seed", 1), ("--seed", 2))
    with pair(*case.options(tmp_path / "out.jsonl", *MESH), own=own) as both:
        ended = [end(process) for process in both]
    for status, out, err in ended:
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "process 1 was given another --seed than process 0: give all processes the same" in err
    assert not (tmp_path / "out.jsonl").exists()
