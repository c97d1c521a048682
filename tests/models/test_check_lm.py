"""`specjax.testing.check_lm` passes models that keep the contract, and names what others do wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support import hybrids, small_target

import specjax
from specjax.lm import BaseLM, Output, answered
from specjax.testing import ContractError, _usual_tolerance, check_lm

NEG = -1e9


@dataclasses.dataclass(frozen=True)
class Own(BaseLM):
    """One layer of attention, with a place for a fault of each kind."""

    vocab_size: int = 16
    width: int = 8
    fault: str = ""

    def init_cache(self, batch, capacity, dtype=None):
        return jnp.zeros((batch, capacity, self.width), dtype or jnp.float32)

    def commit(self, cache, delta, src, dst, counts=None):
        if self.fault == "src":
            src = None if src is None else jnp.broadcast_to(jnp.arange(src.shape[1]), src.shape)
        if self.fault == "dst":
            dst = jnp.broadcast_to(dst[:1], dst.shape)
        return super().commit(cache, delta, src, dst, counts)

    def cache_axes(self, cache):
        return ("batch", None) if self.fault == "axes" else super().cache_axes(cache)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        batch, count = block.tokens.shape
        if self.fault == "raises":
            raise TypeError("no such thing\nand more")
        draw = None if self.fault == "no draw" else draw
        positions = block.positions
        if self.fault == "positions":
            positions = block.length[:, None] + jnp.arange(count)[None]
        angle = jnp.einsum("bt,e->bte", positions.astype(jnp.float32), 10.0 ** -jnp.linspace(0, 2, self.width))
        h = params["embed"][jnp.maximum(block.tokens, 0)] + jnp.sin(angle)
        if self.fault == "padding":
            h = h + (block.tokens < 0).any(axis=1)[:, None, None]
        full = self.fault == "causal"
        visible = jnp.ones((1, count, count), bool) if full else jnp.tril(jnp.ones((1, count, count), bool))
        if block.visible is not None and self.fault != "visible":
            visible = block.visible
        length = jnp.full_like(block.length, cache.shape[1]) if self.fault == "length" else block.length
        if self.fault == "committed":
            length = jnp.maximum(length - 1, 0)
        committed = jnp.arange(cache.shape[1])[None, None] < length[:, None, None]
        mask = jnp.concatenate([jnp.broadcast_to(x, (batch, count, x.shape[2])) for x in (committed, visible)], axis=2)
        memory = jnp.concatenate([cache, h], axis=1)
        h = h + jax.nn.softmax(jnp.where(mask, h @ jnp.swapaxes(memory, 1, 2), NEG)) @ memory
        h = h - h.mean(axis=0, keepdims=True) if self.fault == "rows" else h
        logits = h @ params["embed"].T
        logits = logits[..., 1:] if self.fault == "shape" else logits
        draw = (lambda logits: jnp.argmin(logits, axis=-1)) if self.fault == "draw" else draw
        return answered(Output(memory[:, -count:]), logits, wants, draw)


PARAMS = {"embed": jax.random.normal(jax.random.key(0), (16, 8))}
SAID = {
    "shape": r"a pass gives logits \[B, T, V\] = \(3, 12, 16\), and these are \(3, 12, 15\)",
    "causal": "tokens from position 6 on were changed: row",
    "rows": "each row was read alone: row [012], position",
    "committed": "tokens of the rows were committed, and the next ones read: row",
    "dst": "tokens were read one by one: row",
    "length": "were written into slots from `block.length` on: row|tokens of the rows were committed",
    "visible": "a tree was read: row",
    "positions": "a tree was read: row",
    "src": "the slots 0, 2 and 3 of a tree were committed: row",
    "padding": "the last tokens were -1: row",
    "draw": "`draw` took the likeliest token: row 0, position 0, it is",
    "no draw": "gives no tokens: end it with `specjax.lm.answered`",
    "raises": "while it was tried whether a pass gives finite logits .*: TypeError: no such thing",
    "axes": "cache_axes: an array of shape",
}


def _fast(fault):
    return fault if fault in ("committed", "visible", "src", "raises") else pytest.param(fault, marks=pytest.mark.slow)


@pytest.mark.covers("testing", "lm")
@pytest.mark.parametrize("fault", [_fast(fault) for fault in SAID])
def test_a_fault_is_named(fault):
    with pytest.raises(ContractError, match=SAID[fault]) as caught:
        check_lm(Own(fault=fault), PARAMS, length=12)
    assert "\n" not in str(caught.value)


def test_what_a_small_model_keeps_and_lacks():
    found = check_lm(Own(), PARAMS, length=12)
    assert len(found.kept) == 11 and found.serves == ("drafters that ask for the likeliest tokens", "meshes")
    assert list(found.lacks) == [
        "scores and training, which read without a cache",
        "being a draft model, which reads its own drafts as `past`",
        "heads that read features",
        "drafters that run some of its layers",
    ]
    assert str(found).count("\n") == 16


def test_what_cannot_be_checked():
    with pytest.raises(ValueError, match="at least 12 tokens, got 3"):
        check_lm(Own(), PARAMS, length=3)

    changing = type("Changing", (Own,), {"__hash__": None})
    with pytest.raises(ContractError, match="a model must be hashable"):
        check_lm(changing(), PARAMS)
    reads = dataclasses.replace(Own())
    object.__setattr__(reads, "encodes", True)
    with pytest.raises(ValueError, match="for models without an encoder"):
        check_lm(reads, PARAMS)


def test_types_of_few_bits_are_rounded_more():
    few = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    assert _usual_tolerance(PARAMS) == 1e-3 and _usual_tolerance({**few, "ids": jnp.arange(3)}) == 8 * 2.0**-7


def test_a_pass_that_lacks_what_a_drafter_asks_for():
    @dataclasses.dataclass(frozen=True)
    class Logits(Own):
        def __call__(self, params, block, cache, **how):
            return dataclasses.replace(super().__call__(params, block, cache, **how), topk=None)

    with pytest.raises(ValueError, match=r"a pass of Logits gives no `topk`, .*`specjax.lm.answered`"):
        specjax.generate((Logits(), PARAMS), [[3, 1, 4]], drafter="token_recycling", max_new_tokens=4)
    texts = [
        specjax.generate((Own(), PARAMS), [[3, 1, 4]], drafter=drafter, max_new_tokens=4)[0].tokens
        for drafter in ("none", "token_recycling")
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.covers("testing", "lm")
@pytest.mark.parametrize("name", ["llama", "gated_delta", "mamba2"])
def test_our_own_models_keep_it_all(name):
    lm = small_target.TARGET if name == "llama" else hybrids.MODELS[name]
    assert check_lm(lm, lm.init(jax.random.key(0)), length=12).lacks == {}
