"""Tokens that delete and insert: LLaDA2.2's decoding, by its own rule and by that of SGLang.

Shapes: `B` rows, `W` positions of a block, `H` passes over a block, `V` vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.arrays import Array, Bool, Int
from specjax.diffusion.unmask.base import Choice, Editing, ranks, scheduled_in

RULES = ("reference", "served")
STEPS, MOST = 32, 1000
_TRIES = 5  # how often a pass of `reference` draws away from a block that it has seen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What is known of the passes over a block.

    Attributes:
      original: `[B, W]` bool, the positions whose token was open when the block began. The flag moves with its token.
      count: `[B]` int32, how many these were.
      post: `[B]` int32, passes without an open one of them, as the rule counts them.
      seen: `[B, H, W]` int32, the blocks that the rule compares, -1 for passes that are not done.
      wrote: `[B, H, W]` int32, the tokens that passes of `served` wrote, -1 for none; None in `reference`.
    """

    original: Bool[Array, "B W"]
    count: Int[Array, " B"]
    post: Int[Array, " B"]
    seen: Int[Array, "B H W"]
    wrote: Int[Array, "B H W"] | None


@dataclasses.dataclass(frozen=True)
class Levenshtein(Editing):
    """`joint_threshold` for models with two more tokens: DELETE removes its position, SPLIT puts a mask before the old token.

    A pass writes open positions and replaces known ones. Then the block is read from left to right: later tokens move up where
    one was deleted, and back where a mask came in. A block keeps its length: masks fill its end, or tokens fall off it. The
    prompt's tokens stay where they are, whatever they are.

    An open position is original if it was open when the block began; the others came in. While originals are open, a pass
    writes at least as many positions as there are other masks, and more by the rule. A pass that would repeat itself changes
    its least sure token. The last pass over a block fills it, and moves nothing.

    `reference` is the rule of LLaDA2.2's `generate`. A schedule of `steps` passes says how many positions more than there
    are other masks a pass writes, which may be none; after these passes it writes all. Passes after the originals count
    anew once one is open again, and a block has at most `max_steps_per_block`. A pass repeats itself if it would write a
    block that an earlier pass wrote; one of up to five positions then takes its likeliest token but the one there. A mask
    is never predicted.

    `served` is the rule of SGLang's `JointThresholdInDel`. A pass writes one position more than there are other masks, and
    all of these once no original is open. Passes after the originals never count anew, and a block has at most
    W + `max_post_steps`. A pass repeats itself if it reads a block that an earlier pass read; the position then takes the
    likeliest token that was never written there. A predicted mask opens the position again.

    Where LLaDA2.2's own code draws the position to change, the least sure one is taken, as in FluxServe's port.

    Attributes:
      threshold: confidence for an open position; it must be exceeded.
      editing_threshold: confidence for a known position, likewise.
      max_post_steps: passes after the last original position is known. 0: the pass that fills it is the last one of
        `reference`, and the pass after it of `served`.
      rule: `reference` or `served`.
      steps: passes of the schedule; None: 32. For `reference`.
      max_steps_per_block: the most passes over a block; None: 1000. For `reference`.
      delete_token_id: the id of DELETE; -1: the model's, and without a model none.
      split_token_id: the id of SPLIT; -1: the model's, and without a model none.
      published: whether a block-diffusion model's last block is filled and cut, as in the original; see `Unmask.fills`.
    """

    about = About(
        "levenshtein", "as `joint_threshold`, and deletes and inserts positions; no cache", "LLaDA2.2 2026", "lossy",
        fields=(
            "threshold", "editing_threshold", "max_post_steps", "rule", "steps", "max_steps_per_block", "delete_token_id",
            "split_token_id", "published",
        ),
    )  # fmt: skip

    threshold: float = 0.5
    editing_threshold: float = 0.0
    max_post_steps: int = 16
    rule: str = "reference"
    steps: int | None = None
    max_steps_per_block: int | None = None
    delete_token_id: int = -1
    split_token_id: int = -1
    published: bool = False

    def __post_init__(self):
        if self.rule not in RULES:
            raise ValueError(f"levenshtein has the rules {' and '.join(RULES)}, not {self.rule!r}")
        if not (self.threshold >= 0 and self.editing_threshold >= 0 and self.max_post_steps >= 0):
            raise ValueError(f"levenshtein needs thresholds and max_post_steps >= 0, got {self}")
        own = {"steps": (self.steps, 1), "max_steps_per_block": (self.max_steps_per_block, 2)}
        for name, (value, least) in own.items():
            if value is not None and self.rule != "reference":
                raise ValueError(f"levenshtein: {name} is of rule=reference: leave it out, or take that rule")
            if value is not None and value < least:
                raise ValueError(f"levenshtein needs {name} >= {least}, got {value}")
        if (self.delete_token_id < 0) != (self.split_token_id < 0) or 0 <= self.delete_token_id == self.split_token_id:
            raise ValueError(
                "levenshtein needs delete_token_id and split_token_id, two different ids, or neither of them; got "
                f"{self.delete_token_id} and {self.split_token_id}"
            )

    def for_model(self, masked):
        """See `Unmask.for_model`: with the model's DELETE and SPLIT.

        Raises:
          ValueError: if neither the model nor the policy names them.
        """
        if self.delete_token_id >= 0:
            return self
        if masked.delete_id < 0:
            raise ValueError(
                "levenshtein writes DELETE and SPLIT, and this model's config.json names no such tokens (delete_token_id, "
                "split_token_id): name them in the line, or take joint_threshold"
            )
        return dataclasses.replace(self, delete_token_id=masked.delete_id, split_token_id=masked.split_id)

    @property
    def warped(self):
        """Probabilities after temperature and filters, with any model."""
        return True

    @property
    def idle(self):
        """A pass may only delete, or wait for its schedule."""
        return True

    @property
    def sees_mask(self):
        """See `Unmask.sees_mask`: `served` may predict the mask."""
        return self.rule == "served"

    def _most(self, width: int) -> int:
        """The most passes over a block of `width` positions."""
        return (self.max_steps_per_block or MOST) if self.rule == "reference" else width + self.max_post_steps

    def init(self, batch, width, vocab_size):
        """See `Memory`."""
        history = jnp.full((batch, self._most(width) + 1, width), -1, jnp.int32)
        zero = jnp.zeros((batch,), jnp.int32)
        return Memory(
            jnp.zeros((batch, width), bool), zero, zero, history, None if self.rule == "reference" else history
        )

    def __call__(self, guess, memory):
        first = guess.step == 0
        original = jnp.where(first[:, None], guess.masked, memory.original)
        count = jnp.where(first, guess.masked.sum(axis=1), memory.count)
        memory = dataclasses.replace(memory, original=original, count=count)
        rule = self._reference if self.rule == "reference" else self._served
        written, ends, memory = rule(guess, memory, guess.masked & original)
        block, original = self.moved(guess, written, memory.original)
        if self.rule == "reference":
            ends = ends | ~(guess.masked | (block != guess.current)).any(axis=1)
        known = guess.committed
        choice = Choice(
            commit=guess.masked & (block != guess.mask_id),
            score=jnp.where(block == guess.tokens, jnp.exp(_of(guess.log_probs, guess.tokens)), 0.0),
            tokens=block,
            reopen=known & (block == guess.mask_id),
            edit=known & (block != guess.mask_id) & (block != guess.current),
            stay=~ends,
        )
        return choice, dataclasses.replace(memory, original=original)

    def _reference(self, guess, memory, opened):
        """The block with its writes `[B, W]`, in which rows it is done `[B]`, and the memory."""
        x, sure = guess.tokens, jnp.exp(_of(guess.log_probs, guess.tokens))
        left = opened.sum(axis=1)
        post = jnp.where(left == 0, memory.post + 1, 0)
        steps = self.steps or STEPS
        need = scheduled_in(steps, guess.step, memory.count) + guess.masked.sum(axis=1) - left
        fill = self._sure(guess, sure, need) | (guess.masked & (guess.step >= steps)[:, None])
        edit = guess.committed & (sure > self.editing_threshold) & (x != guess.current)
        last = self._spent(post, opened, fill) | (guess.step >= self._most(guess.masked.shape[1]) - 1)
        fill = jnp.where(last[:, None], guess.masked, fill)
        x = jnp.where(last[:, None] & self._edits(x), self._plain(guess), x)
        block = jnp.where(fill | edit, x, guess.current)

        def again(_, carry):
            block, repeats = carry
            moves = block != guess.current
            block = self.redrawn(guess, block, sure, moves, repeats & ~last, block[:, None])
            return block, _in(block, memory.seen)

        block, _ = jax.lax.fori_loop(0, _TRIES, again, (block, _in(block, memory.seen)))
        seen = _put(memory.seen, guess.step, block)
        return block, last, dataclasses.replace(memory, post=post, seen=seen)

    def _served(self, guess, memory, opened):
        """See `_reference`."""
        x, mask = guess.tokens, guess.mask_id
        sure = jnp.exp(_of(guess.log_probs, x))
        most = jnp.exp(guess.log_probs[:, :, mask])
        opens = (most > sure) & ~opened & ~guess.sampled[:, None]
        x, sure = jnp.where(opens, mask, x), jnp.where(opens, most, sure)
        left = opened.sum(axis=1)
        need = 1 + guess.masked.sum(axis=1) - left
        fill = jnp.where((left > 0)[:, None], self._sure(guess, sure, need), guess.masked)
        post = memory.post + (left == 0)
        last = self._spent(post, opened, fill) | (guess.step >= self._most(guess.masked.shape[1]))
        fill = jnp.where(last[:, None], guess.masked, fill)
        x = jnp.where(last[:, None] & (self._edits(x) | (x == mask)), self._plain(guess), x)
        write = fill | (guess.committed & (sure > self.editing_threshold) & (x != guess.current))
        repeats = _in(guess.current, memory.seen) & ~last
        x = self.redrawn(guess, x, sure, write & (x != guess.current), repeats, memory.wrote)
        seen = _put(memory.seen, guess.step, guess.current)
        wrote = _put(memory.wrote, guess.step, jnp.where(write, x, -1))
        ends = last | ~write.any(axis=1)
        block = jnp.where(write, x, guess.current)
        return block, ends, dataclasses.replace(memory, post=post, seen=seen, wrote=wrote)

    def redrawn(self, guess, block, sure, moves, when, before):
        """Tokens `[B, W]` with another one at the least sure position that `moves` `[B, W]`, in rows where `when` `[B]`.

        It is the likeliest that is not among those `before` `[B, N, W]`; -1 stands for none.
        """
        at = jnp.argmin(jnp.where(moves, sure, jnp.inf), axis=1)
        other = jnp.argmax(_without(_at(guess.log_probs, at), _at(jnp.swapaxes(before, 1, 2), at)), axis=1)
        place = (when & moves.any(axis=1))[:, None] & (jnp.arange(block.shape[1])[None] == at[:, None])
        return jnp.where(place, other[:, None].astype(jnp.int32), block)

    def _sure(self, guess, sure, need):
        """The open positions `[B, W]` above the threshold or, if these are fewer than `need` `[B]`, so many of the surest."""
        above = guess.masked & (sure > self.threshold)
        few = above.sum(axis=1) < need
        return jnp.where(few[:, None], guess.masked & (ranks(sure, guess.masked) < need[:, None]), above)

    def _spent(self, post, opened, fill):
        """In which rows `[B]` the last pass is due, of those whose originals are known; `opened` are the others `[B, W]`."""
        if self.max_post_steps:
            return post >= self.max_post_steps
        return opened.any(axis=1) & ~(opened & ~fill).any(axis=1)

    def _edits(self, tokens):
        """Where tokens are DELETE or SPLIT."""
        return (tokens >= 0) & ((tokens == self.delete_token_id) | (tokens == self.split_token_id))

    def _plain(self, guess):
        """The likeliest tokens `[B, W]` that are neither a mask nor DELETE nor SPLIT."""
        ids = jnp.asarray([i for i in (guess.mask_id, self.delete_token_id, self.split_token_id) if i >= 0])
        return jnp.argmax(guess.log_probs.at[:, :, ids].set(-jnp.inf), axis=-1).astype(jnp.int32)

    def moved(self, guess, written, original):
        """The block `[B, W]` after DELETE and SPLIT, and which of its positions are original `[B, W]`.

        Args:
          guess: what was predicted; tokens move among positions that it may write, as far as these are consecutive.
          written: `[B, W]` int32, the block with its writes.
          original: `[B, W]` bool, before.
        """
        own, width = guess.masked | guess.committed, written.shape[1]
        gone = own & (written == self.delete_token_id) & (self.delete_token_id >= 0)
        split = own & (written == self.split_token_id) & (self.split_token_id >= 0)
        place = jnp.arange(width)[None]
        size = jnp.where(gone, 0, jnp.where(split, 2, 1))
        ahead = jnp.cumsum(size, axis=1) - size
        begin = jax.lax.cummax(jnp.where(own, -1, place), axis=1) + 1  # of the consecutive positions
        end = jax.lax.cummin(jnp.where(own, width, place), axis=1, reverse=True)
        to = begin + ahead - jnp.take_along_axis(ahead, jnp.minimum(begin, width - 1), axis=1)
        inside = lambda to: jnp.where(own & ~gone & (to < end), to, width)

        def fill(blank, first, second):
            put = lambda blank, to, new: blank.at[to].set(new, mode="drop")
            blank = jax.vmap(put)(blank, inside(to), first)
            return jax.vmap(put)(blank, jnp.where(split, inside(to + 1), width), second)

        block = fill(jnp.where(own, guess.mask_id, written), jnp.where(split, guess.mask_id, written), guess.current)
        return block, fill(jnp.zeros_like(original), original & ~split, original)


def _of(scores, tokens) -> Array:
    """The entries `[B, W]` of scores `[B, W, V]` for tokens `[B, W]`."""
    return jnp.take_along_axis(scores, tokens[:, :, None], axis=2)[:, :, 0]


def _at(values, at) -> Array:
    """The values of one position `[B]` of each row."""
    wide = jnp.expand_dims(at, tuple(range(1, values.ndim)))
    return jnp.take_along_axis(values, wide, axis=1)[:, 0]


def _without(scores, ids) -> Array:
    """Scores `[B, V]` with -inf at ids `[B, N]`; negative ids count for nothing."""
    size = scores.shape[1]
    return jax.vmap(lambda row, ids: row.at[ids].set(-jnp.inf, mode="drop"))(scores, jnp.where(ids < 0, size, ids))


def _in(block, seen) -> Array:
    """Whether blocks `[B, W]` are among those seen `[B, H, W]`."""
    return jnp.any(jnp.all(seen == block[:, None], axis=2), axis=1)


def _put(history, step, block) -> Array:
    """The history `[B, H, W]` with the block `[B, W]` of pass `step` `[B]`."""
    return jax.vmap(lambda history, step, block: history.at[step].set(block, mode="drop"))(history, step, block)
