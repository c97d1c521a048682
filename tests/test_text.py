"""Where a stop string ends a text, and how a text comes: one definition for what is streamed and for the record."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from specjax.models.text import new_text
from specjax.serve.request import Request
from specjax.serve.slots import record_of
from specjax.serve.text import Written, cut_at_stop
from specjax.serve.watch import Watch
from specjax.state import Finish

PROMPT = (0,)
GIRL = (" a", " girl", " with", " ir", "on")
END = "<|end|>"
ENDS = ("Hi", " you", END, "x", "</s>", END)
"""With tokens that transformers' `StopStringCriteria` sees, and the text is without."""


class Bytes:
    """A tokenizer of these pieces, token i + 1 the i-th; decoding joins their bytes. Names in `<>` are special tokens."""

    def __init__(self, pieces):
        self.pieces = [b">", *[p if isinstance(p, bytes) else p.encode() for p in pieces]]
        self.decoded = 0

    def decode(self, ids, skip_special_tokens=False, **options):
        self.decoded += len(ids)
        special = lambda piece: skip_special_tokens and piece[:1] == b"<"
        return b"".join(self.pieces[i] for i in ids if not special(self.pieces[i])).decode(errors="replace")


def lengths(count, width):
    """How many tokens a row has after every call of `width` steps."""
    return [*range(width, count, width), count]


def streamed(pieces, stop, width, reason=Finish.LENGTH, prompt=PROMPT, tokenizer=None):
    """What a stream brings in calls of `width` tokens, and the record of the row as it then is."""
    tokenizer = tokenizer or Bytes(pieces)
    request = Request("p" if prompt is PROMPT else prompt, prompt, max_new_tokens=len(pieces), stop=tuple(stop))
    text, watch = [], Watch(tokenizer, lambda index, new: text.append(new))
    tokens = np.asarray([[*prompt, *range(1, len(pieces) + 1)]])
    for count in lengths(len(pieces), width):
        finish = np.asarray([reason if count == len(pieces) else Finish.RUNNING])
        stats = SimpleNamespace(steps=np.asarray([count]), accepted=np.asarray([[0, 1]]))
        host = SimpleNamespace(
            tokens=tokens, prompt_length=np.asarray([len(prompt)]), length=np.asarray([len(prompt) + count]),
            finish=finish, stats=stats, logprobs=None, found=None,
        )  # fmt: skip
        stopped = watch(host, {0: (0, request)})
        if stopped:
            host.finish = np.asarray([Finish.STOP])
            break
    assert not any("\ufffd" in piece for piece in text[:-1])
    return "".join(text), record_of(tokenizer, request, host, 0, watch.end(0))


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
        ((b"x\xc3", b"\xa9", "y", b"\xf0\x9f", b"\x98"), ("never",), "xéy\ufffd", None),
        ((b"x\xc3", b"\xa9"), ("\ufffd",), "xé", None),  # half a character is not this one
        (ENDS, (END,), "Hi you", 3),
        (ENDS, ("end|>",), "Hi you", 3),
        (ENDS, ("ou" + END,), "Hi y", 3),
        (ENDS, ("u" + END + "x",), "Hi yo", 4),
        (ENDS, (f"x</s>{END}",), "Hi you", 6),
        (ENDS, (f"</s>{END}", "never"), "Hi youx", 6),
        (ENDS, (END + END,), "Hi youx", None),
    ),
)
def test_streams_and_records_end_alike(pieces, stop, text, count):
    tokens = tuple(range(1, len(pieces) + 1))
    cut = cut_at_stop(Bytes(pieces), Request("p", PROMPT), tokens, stop)
    assert cut == (None if count is None else (text, count))
    for width in range(1, len(pieces) + 1):
        came, record = streamed(pieces, stop, width)
        assert (came, record.text) == (text, text), width
        assert record.tokens == list(tokens[:count])
        assert record.finish_reason == ("length" if count is None else "stop")


def test_a_stop_string_before_eos_counts():
    """A row that ended by itself in the call that brought the stop string."""
    came, record = streamed(GIRL, ("ir",), 5, reason=Finish.EOS)
    assert (came, record.text, record.finish_reason, record.new_tokens) == (" a g", " a g", "stop", 2)


def test_no_more_waits_than_may_be_taken_back():
    """Half a character, and what a stop string may begin with."""
    written = Written(Bytes(["ab", b"\xf0\x9f", b"\x98\x80", b"\xff", "c"]), Request("p", PROMPT))
    assert [written.add([i]) for i in range(1, 6)] == ["ab", "", "😀", "", "\ufffdc"] and written.rest == ""
    assert written.add([2, 1]) + written.rest == "\ufffdab"
    assert streamed(("ab", "cd", "ef"), ("long stop",), 1)[0] == "abcdef"


@pytest.mark.parametrize(
    ("pieces", "prompt", "text", "printed"),
    (
        (("c", b"x\xc3", b"\xa9", "y"), (1, 2), "éy", "cxéy"),  # as transformers' TextStreamer prints them
        ((b"\xf0\x9f", b"\x98", b"\x80z", "y"), (1, 2), "😀zy", "😀zy"),
        ((b"x\xc3", "y", "z"), (1,), "\ufffdyz", "x\ufffdyz"),
    ),
)
def test_a_character_that_ids_of_a_prompt_begin(pieces, prompt, text, printed):
    tokenizer, new = Bytes(pieces), tuple(range(len(prompt) + 1, len(pieces) + 1))
    request = Request(prompt, prompt)
    for width in (1, 2):
        written = Written(tokenizer, request)
        came = "".join(written.add(new[at : at + width]) for at in range(0, len(new), width))
        assert came + written.rest == text == new_text(tokenizer, prompt, new)
    assert tokenizer.decode(list(prompt)).rstrip("\ufffd") + text == printed == tokenizer.decode([*prompt, *new])
    assert new_text(tokenizer, prompt, ()) == ""


@pytest.mark.parametrize("stop", ((), ("never", END + "never"), (" 1998 1999",)))
def test_every_token_is_read_a_few_times(stop):
    """Whatever the length of prompt and text, and where the text ends."""
    pieces = [f" {i}" for i in range(2000)]
    tokenizer = Bytes(pieces)
    came, record = streamed(pieces, stop, 8, tokenizer=tokenizer)
    assert came == record.text and record.new_tokens == 2000
    assert came == "".join(pieces)[: -len(stop[0])] if record.finish_reason == "stop" else came == "".join(pieces)
    assert tokenizer.decoded < 25 * len(pieces)
    tokenizer, special = Bytes([END]), [1] * 2000  # nothing is written
    written = Written(tokenizer, Request("p", PROMPT))
    assert [written.add(special[at : at + 8]) for at in range(0, 2000, 8)] == [
        ""
    ] * 250 and tokenizer.decoded < 25 * 2000


@pytest.mark.slow
def test_stop_strings_are_those_of_transformers():
    """Drawn texts of byte-level tokens and special ones against `StopStringCriteria`, and the text against `decode`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import AddedToken, Tokenizer, decoders, models

    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("c", "Ġ"), ("Ã", "©"), ("x", "Ã"), ("â", "Ĥ")]
    single = [*"abcdefx", "Ġ", "Ã", "©", "â", "Ĥ", "¬", "ð", "Ł", "ĺ", "Ģ"]
    vocab = {piece: i for i, piece in enumerate([*single, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<|end|>", "<|x y|>")])
    made.add_tokens(["<think>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", bos_token="<s>")
    rng, found = random.Random(0), 0
    for stop in ("<|end|>", "end|>", "b<|end|>", "<s>a", "|>ab", "é", "€", "é<s>", "bc a", "a<think>", "😀", "x y|>c"):
        criteria = transformers.StopStringCriteria(tokenizer, [stop])
        for _ in range(200):
            prompt, ids = ([rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 14))] for _ in range(2))
            ends = (n for n in range(1, len(ids) + 1) if criteria(torch.tensor([ids[:n]]), None)[0])
            wanted = next(ends, None)
            cut = cut_at_stop(tokenizer, Request("a", (0,)), ids, (stop,))
            assert (cut and cut[1]) == wanted, (stop, ids)
            found += wanted is not None
            written = Written(tokenizer, Request(prompt, tuple(prompt)))
            came = "".join(written.add(ids[at : at + 3]) for at in range(0, len(ids), 3)) + written.rest
            before = tokenizer.decode(prompt, skip_special_tokens=True).rstrip("\ufffd")
            assert before + came == tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    assert found > 100
