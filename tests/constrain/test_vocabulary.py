"""The bytes of tokens: those that a tokenizer's own decoder writes."""

import pytest
from support.constraints import vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models

from specjax.constrain import Vocabulary


def test_byte_level_tokens_are_what_is_decoded():
    own = vocabulary()
    whole = 0
    for token, text in enumerate(own.tokens):
        said = own.tokenizer.decode([token], skip_special_tokens=True)
        assert said == (b"" if text is None else text).decode(errors="replace"), token
        whole += "\ufffd" not in said
    assert whole > 1000 and own.tokens[own.eos[0]] is None
    pair = [token for token, text in enumerate(own.tokens) if text in (b"\xc3", b"\xa9")]
    assert own.tokenizer.decode(sorted(pair, key=lambda token: -own.tokens[token][0])) == "é"


def test_texts_are_spelled_by_the_longest_tokens():
    own, text = vocabulary(), 'Sort the words: "é" 12\n\U0001f600'
    found = own.spelled(text)
    assert b"".join(own.tokens[token] for token in found).decode() == text and len(found) < len(text.encode())
    for at, token in enumerate(found):
        rest = b"".join(own.tokens[later] for later in found[at:])
        assert len(own.tokens[token]) == max(len(each) for each in own.tokens if each and rest.startswith(each))
    assert own.spelled("") == [] and of(decoders.ByteLevel(), ["a"]).spelled("ab") is None


class Fast:
    def __init__(self, backend):
        self.backend_tokenizer = backend


def of(decoder, pieces, added=()):
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_tokens(list(added))
    return Vocabulary(Fast(tokenizer), len(pieces) + len(added) + 2, (0,))


def test_sentencepiece_tokens_are_what_is_decoded():
    """After another token, since the first one of a text loses its space."""
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pieces = ["</s>", "a", "\u2581b", "\u2581\u2581", "<0x0A>", "<0xC3>", "<0xA9>", "é"]
    added = [AddedToken("<pad>", special=True), AddedToken("<think>", special=False)]
    own = of(decoders.Sequence(parts), pieces, added)
    assert own.spelled("a b") == [1, 2] and own.spelled("\ud800") is None
    assert own.tokens[1:] == (b"a", b" b", b"  ", b"\n", b"\xc3", b"\xa9", "é".encode(), None, b"<think>", None, None)
    decode = own.tokenizer.backend_tokenizer.decode
    for row in ((1, 2, 3, 1), (1, 4, 5, 6, 7), (1, 9, 2)):
        assert decode(list(row)) == b"".join(own.tokens[token] for token in row).decode()


def test_tokens_that_are_not_joined_are_refused():
    with pytest.raises(ValueError, match="decodes by WordPiece does not join its tokens one after the other"):
        _ = of(decoders.WordPiece(), ["a", "##b"]).tokens
    with pytest.raises(ValueError, match="Fast does not tell what its tokens write"):
        _ = Vocabulary(Fast(None), 3, (0,)).tokens
