"""Where a stop string ends a text: one definition for what is streamed and for the record."""

from types import SimpleNamespace

import numpy as np
import pytest

from specjax.serve.request import Request
from specjax.serve.slots import Watch, record_of
from specjax.serve.text import cut_at_stop, settled
from specjax.state import Finish

PROMPT = (0,)
GIRL = (" a", " girl", " with", " ir", "on")


class Bytes:
    """A tokenizer of these pieces, token i + 1 the i-th; decoding joins their bytes."""

    def __init__(self, pieces):
        self.pieces = [b">", *[p if isinstance(p, bytes) else p.encode() for p in pieces]]

    def decode(self, ids, **options):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def lengths(count, width):
    """How many tokens a row has after every call of `width` steps."""
    return [*range(width, count, width), count]


def streamed(pieces, stop, width, reason=Finish.LENGTH):
    """What a stream brings in calls of `width` tokens, and the record of the row as it then is."""
    tokenizer, request = Bytes(pieces), Request("p", PROMPT, max_new_tokens=len(pieces))
    text, watch = [], Watch(tokenizer, stop, lambda index, new: text.append(new))
    tokens = np.asarray([[*PROMPT, *range(1, len(pieces) + 1)]])
    for count in lengths(len(pieces), width):
        finish = np.asarray([reason if count == len(pieces) else Finish.RUNNING])
        stats = SimpleNamespace(steps=np.asarray([count]), accepted=np.asarray([[0, 1]]))
        host = SimpleNamespace(
            tokens=tokens, prompt_length=np.asarray([1]), length=np.asarray([1 + count]), finish=finish, stats=stats,
            logprobs=None, found=None,
        )  # fmt: skip
        stopped = watch(host, {0: (0, request)})
        if stopped:
            host.finish = np.asarray([Finish.STOP])
            break
    return "".join(text), record_of(tokenizer, request, host, 0, stop)


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "count"),
    (
        (GIRL, (" girl ", "ir"), " a g", 2),  # the longer one begins before, and is complete too late
        (GIRL, (" girl ",), " a", 3),
        (GIRL, ("irl", " gi"), " a", 2),  # complete in one token: the earliest counts
        (GIRL, ("th i", " iron"), " a girl wi", 4),  # across tokens, overlapping
        (GIRL, ("xyz",), " a girl with iron", None),
        (GIRL, ("on",), " a girl with ir", 5),
        (GIRL, (" a",), "", 1),
        (("ab", "ab", "ac"), ("abac", "ba"), "a", 2),
        ((b"x\xc3", b"\xa9", "y", b"\xf0\x9f", b"\x98", b"\x80z"), ("éy",), "x", 3),
        ((b"x\xc3", b"\xa9", "y", b"\xf0\x9f", b"\x98", b"\x80z"), ("😀",), "xéy", 6),
        ((b"x\xc3", b"\xa9", "y", b"\xf0\x9f", b"\x98", b"\x80z"), ("never",), "xéy😀z", None),
    ),
)
def test_streams_and_records_end_alike(pieces, stop, text, count):
    tokens = tuple(range(1, len(pieces) + 1))
    assert cut_at_stop(Bytes(pieces), PROMPT, tokens, stop) == (text, count)
    for width in range(1, len(pieces) + 1):
        came, record = streamed(pieces, stop, width)
        assert (came, record.text) == (text, text), width
        assert record.tokens == list(tokens[:count])
        assert record.finish_reason == ("length" if count is None else "stop")


def test_a_stop_string_before_eos_counts():
    """A row that ended by itself in the call that brought the stop string."""
    came, record = streamed(GIRL, ("ir",), 5, reason=Finish.EOS)
    assert (came, record.text, record.finish_reason, record.new_tokens) == (" a g", " a g", "stop", 2)


def test_what_is_settled():
    """Three bytes of a character may be three replacements: the half stop string before them waits as well."""
    assert settled("abc\ufffd\ufffd\ufffd", ("cé",)) == "ab" and settled("abc", ()) == "abc"
    assert settled("ab", ("long stop",)) == ""
