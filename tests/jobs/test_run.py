"""The loop of a job needs a completer, and neither a model nor a file."""

import json
import os
import signal
from dataclasses import dataclass, field

import pytest

from specjax.jobs.options import JobOptions
from specjax.jobs.run import complete
from specjax.serve.engine import Timing
from specjax.serve.request import Record, Request
from specjax.serve.slots import Turn


@dataclass
class Backwards:
    """Completes the last request first, one a turn, and may be told to end."""

    items: list
    end: int = 0
    timing: Timing = field(default_factory=Timing)
    tokenizer = None
    decoding = "plain"
    prefix = ()

    def turns(self, left, on_text):
        for index in reversed(left):
            self.timing.decode_seconds += 1
            self.timing.new_tokens += 1
            prompt = self.items[index].prompt
            if self.end:
                os.kill(os.getpid(), self.end)
            yield Turn([(index, Record(prompt, None, [index], "length", 1, 1, 1.0, line=index + 1))], 1, 1, 1)


ITEMS = [Request([1], (1,), line=1), Record.failed("x", "no", line=2), Request([2], (2,), line=3)]


@pytest.mark.parametrize(("unordered", "order"), ((False, [1, 2, 3]), (True, [2, 3, 1])))
def test_records_come_in_order_or_as_they_finish(capsys, unordered, order):
    options = JobOptions(input="in.jsonl", json=True, unordered=unordered)
    assert complete(options, Backwards(ITEMS), ITEMS, None) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["line"] for line in out.splitlines()] == order
    assert err.splitlines() == [
        "specjax: error: in.jsonl, line 2: no",
        "specjax: 2 new tokens in 2 steps: plain decoding, 1.00 tokens per step, 1 tokens/s",
    ]


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_what_ends_a_job_without_a_file(capsys, number):
    options = JobOptions(input="in.jsonl", output="-", unordered=True)
    assert complete(options, Backwards(ITEMS, number), ITEMS, None) == 128 + number
    out, err = capsys.readouterr()
    assert [json.loads(line)["line"] for line in out.splitlines()] == [2, 3]
    assert err.splitlines()[-1].endswith("; 2 of 3 records were written")


class Drafting(Backwards):
    decoding = "prompt_lookup"


@pytest.mark.parametrize(
    ("verifier", "cache", "said"),
    (
        (None, None, ""),
        ("rejection", None, ""),
        ("fly:window=2", None, ", verifier fly:window=2 (lossy)"),
        (None, "ems:budget=64", ", cache ems:budget=64 (lossy)"),
    ),
)
def test_what_is_lossy_is_called_so(capsys, verifier, cache, said):
    """Of plain decoding the cache alone: a verifier has no drafts there."""
    own = {name: f"({line})" for name, line in (("verifier", verifier), ("cache", cache)) if line}
    drafter = "prompt_lookup:" + ",".join(f"{name}={line}" for name, line in own.items()) if own else None
    options = JobOptions(input="in.jsonl", json=True, drafter=drafter)
    for completer, how in (
        (Drafting(ITEMS), f"drafter prompt_lookup{said}"),
        (Backwards(ITEMS), said if cache else "/s"),
    ):
        complete(options, completer, ITEMS, None)
        assert capsys.readouterr().err.splitlines()[-1].endswith(how)
