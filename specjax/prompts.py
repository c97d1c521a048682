"""The input of decoders: prompts, one per row, and the options of each.

In the shape descriptions `R` denotes rows, `P` prompt columns, `K` ids that end a text.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Source
from specjax.names import check_keywords
from specjax.pretty import Pretty
from specjax.sampling import SamplingArrays, row_keys
from specjax.sampling_params import FIELDS

Array = jax.Array | np.ndarray
"""An array on a device or on the host."""

OPEN = -1
"""Stands in the place of a token that is to be filled in."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts(Pretty):
    """Prompts, one per row, and how each is completed: the input of every decoder's `init` and `insert`.

    `Prompts.of` makes them from lists of token ids. A caller that has arrays, possibly traced ones, passes them as
    fields.

    Attributes:
      tokens: `[R, P]` int32, padded on the right. A decoder that fills in (`Decoder.fills_in`) also writes the
        positions of a prompt that hold `OPEN`, -1, or its own mask id.
      lengths: `[R]` int32, tokens of each prompt, at least 1.
      keys: `[R]` typed keys (`specjax.sampling.row_keys`, or `jax.random.split`), one per row, so that each row has its
        own noise.
      limit: `[R]` int32, the length of the text, prompt and output, at which a row stops.
      sampling: how the rows draw their tokens.
      eos: `[R, K]` int32, ids that end a row's text, padded with -1; None for no such ids.
      width: static, tokens of the prompts that are read together; None lets P decide.
      source: what the encoder reads, a source for each row, if the target has an encoder (`LM.encodes`); otherwise
        None. The prompts are then the beginning of the decoder's text.
    """

    tokens: Array
    lengths: Array
    keys: jax.Array
    limit: Array
    sampling: SamplingArrays
    eos: Array | None = None
    width: int | None = dataclasses.field(default=None, metadata={"static": True})
    source: Source | None = None

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int] | Array],
        max_new_tokens: int | Sequence[int],
        *,
        seed: int | Sequence[int] = 0,
        keys: jax.Array | None = None,
        eos: Sequence[int] = (),
        source: Sequence[Any] | None = None,
        **sampling: Any,
    ) -> Self:
        """Prompts from lists of token ids, on the device.

        Args:
          prompts: R lists or arrays `[n]` of token ids.
          max_new_tokens: the most new tokens after a prompt: one number, or one per row. 0 if a prompt already holds
            all positions that are to be filled in.
          seed: one, or one per row. With a prompt's ids it determines the noise, the same as in `specjax.generate`.
          keys: `[R]` typed keys, in place of the seed's.
          eos: ids that end a text.
          source: R lists of token ids, or R arrays `[S, F]` of features, for a target with an encoder.
          **sampling: parameters of the warpers such as `temperature`, one value or one per row: see
            `SamplingArrays.make`.

        Raises:
          ValueError: for anything but lists of token ids, and for an option that is out of range.

        >>> Prompts.of([[5, 6, 7], [8]], max_new_tokens=4, eos=[2], temperature=[0.0, 1.0]).limit.tolist()
        [7, 5]
        """
        check_keywords("Prompts.of", sampling, ["max_new_tokens", "seed", "keys", "eos", "source", *FIELDS])
        rows = [_ids(prompt) for prompt in prompts]
        lengths = np.asarray([len(ids) for ids in rows], np.int32)
        tokens = np.zeros((len(rows), max(lengths, default=0)), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        new = np.broadcast_to(np.asarray(max_new_tokens, np.int32), lengths.shape)
        ends = np.broadcast_to(np.asarray([*eos] or [-1], np.int32), (len(rows), len(eos) or 1))
        reads = None if source is None else Source.of(source)
        if source is not None and len(source) != len(rows):
            raise ValueError(f"there are {len(source)} sources and {len(rows)} prompts: give a source per prompt")
        if keys is None:
            own = [None] * len(rows) if source is None else source
            keys = row_keys(seed, [identity(ids.tolist(), read) for ids, read in zip(rows, own, strict=True)])
        tokens, lengths, limit, ends, reads = jax.device_put((tokens, lengths, lengths + new, ends, reads))
        return cls(tokens, lengths, keys, limit, SamplingArrays.make(len(rows), **sampling), ends, source=reads)

    def ends(self, width: int) -> jax.Array:
        """The ids that end a text, `[R, width]`, for a state with room for that many.

        Raises:
          ValueError: if there are more.
        """
        if self.eos is None:
            return jnp.full((self.tokens.shape[0], width), -1, jnp.int32)
        more = width - self.eos.shape[1]
        if more < 0:
            raise ValueError(
                f"{self.eos.shape[1]} ids end a text, and the state has room for {width}: make it with "
                f"specjax.decoder.empty(..., eos_width={self.eos.shape[1]})"
            )
        return jnp.pad(self.eos, ((0, 0), (0, more)), constant_values=-1)

    def check(self) -> None:
        """Checks shapes and key types; this works in a traced program too.

        A single key would be broadcast, and all rows would have the same noise.

        Raises:
          ValueError: for a wrong shape or type.
        """
        if np.ndim(self.tokens) != 2:
            raise ValueError(f"tokens are of shape {np.shape(self.tokens)}: give [R, P], a row each")
        count = len(self.tokens)
        _check_keys(self.keys, count)
        if np.shape(self.lengths) != (count,):
            raise ValueError(f"lengths are of shape {np.shape(self.lengths)}: give one per prompt, [{count}]")
        if np.shape(self.limit) != (count,):
            raise ValueError(f"limit is of shape {np.shape(self.limit)}: give one per prompt, [{count}]")
        if len(self.sampling.temperature) != count:
            raise ValueError(
                f"sampling is of {len(self.sampling.temperature)} rows: specjax.sampling.SamplingArrays.make({count}) fits"
            )
        if self.eos is not None and (np.ndim(self.eos) != 2 or len(self.eos) != count):
            raise ValueError(
                f"eos is of shape {np.shape(self.eos)}: give [{count}, K], the ids of each row, -1 where it has fewer"
            )
        if self.source is not None:
            _check_source(self.source, count)


def _ids(prompt: Any) -> np.ndarray:
    """A prompt's token ids `[n]`."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"prompts are lists of token ids, one per row, and one of these is {prompt!r:.60}")
    return ids.astype(np.int32)


def identity(prompt: Any, source: Any = None) -> Any:
    """The ids that decide a row's noise, for `row_keys`: the source's, then the prompt's. Features count as their bits.

    Args:
      prompt: token ids.
      source: token ids, or an array `[S, F]` of features; None: no source.
    """
    if source is None:
        return prompt
    read = np.asarray(source)
    read = read if read.ndim == 1 else np.ascontiguousarray(read, "<f4").view("<i4").ravel()
    return np.concatenate([read.astype(np.int32), np.asarray(prompt, np.int32)])


def _check_keys(keys, count):
    if not jnp.issubdtype(getattr(keys, "dtype", np.dtype(int)), jax.dtypes.prng_key):
        raise ValueError(
            "keys are not typed: make them with specjax.sampling.row_keys(seed, ids) or "
            "jax.random.split(jax.random.key(seed), rows); old ones of jax.random.PRNGKey go through jax.random.wrap_key_data"
        )
    if str(jax.random.key_impl(keys)) != "threefry2x32":
        raise ValueError(
            f"keys are {jax.random.key_impl(keys)} keys: jax.random.key(seed, impl='threefry2x32') makes one that fits"
        )
    if keys.shape != (count,):
        raise ValueError(
            f"keys are of shape {keys.shape}, and there are {count} prompts: give a key per row, since each has noise "
            f"of its own: specjax.sampling.row_keys(seed, ids), or jax.random.split(key, {count})"
        )


def _check_source(source, count):
    shape = np.shape(source.inputs)
    if len(shape) not in (2, 3) or shape[0] != count or np.shape(source.lengths) != (count,):
        raise ValueError(
            f"the source is of shape {shape} with lengths of shape {np.shape(source.lengths)}: give token ids "
            f"[{count}, S] or features [{count}, S, F], and lengths [{count}]"
        )
    if not jnp.issubdtype(source.inputs.dtype, jnp.integer if len(shape) == 2 else jnp.floating):
        raise ValueError(
            f"a source [B, S] is of token ids and [B, S, F] of features, not {source.inputs.dtype} {shape}"
        )


def check_padding(tokens: np.ndarray, lengths: np.ndarray, short: np.ndarray) -> None:
    """Checks that prompts are not padded on the left: that shorter rows do not all begin with a run of one id that
    fills their padding.

    Args:
      tokens: `[R, P]`.
      lengths: `[R]`.
      short: rows that are shorter than P.

    Raises:
      ValueError: if they are.
    """
    if not short.size:
        return
    pads = tokens.shape[1] - lengths
    begin = {token for row in short for token in tokens[row, : pads[row]]}
    more = any(tokens[row, pads[row]] in begin for row in short)
    if len(begin) == 1 and not more and any(len(set(tokens[row, lengths[row] :])) > 1 for row in short):
        raise ValueError(
            f"prompt {short[0]} is padded on the left with the id {begin.pop()}: pad on the right (padding_side='right')"
        )
