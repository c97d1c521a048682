"""Rollouts for Tunix (`google-tunix`): the interface of its rollout engines, over a decoder of this package.

`engine` gives what `ClusterConfig(rollout_engine=...)` takes. Nothing here imports Tunix but `engine`.
In the shape descriptions `B` denotes samples, `P` prompt columns, `T` completion columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from specjax.lm import LM, Block, Wants
from specjax.prompts import Prompts
from specjax.rollouts.placing import reshard
from specjax.rollouts.samples import Rollout, rollout
from specjax.rollouts.scores import token_logprobs
from specjax.settings import settled
from specjax.speculative import Speculative

Array = jax.Array
PyTree = Any


class Actor(nnx.Module):
    """A model of this package as a module that Tunix trains: every parameter is an `nnx.Param`, named by its path.

    Args:
      lm: the model, such as `specjax.load(...).lm`.
      params: its parameters, nested dicts of arrays.
    """

    def __init__(self, lm: LM, params: PyTree):
        flat = flatten_dict(params)
        self.lm, self.paths = lm, tuple(flat)
        self.weights = nnx.Dict({_named(path): nnx.Param(leaf) for path, leaf in flat.items()})

    def __call__(
        self, tokens: Array, positions: Array | None = None, cache: None = None, attention_mask: Array | None = None
    ) -> tuple[Array, None]:
        """Logits `[B, T, V]` float32 of each next token, and no cache.

        Args:
          tokens: `[B, T]` int32.
          positions: `[B, T]` int32; None: from 0 on.
          cache: None.
          attention_mask: `[B, T, T]` bool, what each token sees; None: causal.
        """
        rows, size = tokens.shape
        at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], tokens.shape) if positions is None else positions
        visible = None
        if attention_mask is not None:  # padding sees itself, so that its softmax is over something
            visible = attention_mask | jnp.eye(size, dtype=bool)[None]
        block = Block(tokens, at, jnp.zeros((rows,), jnp.int32), visible)
        params = unflatten_dict({path: self.weights[_named(path)][...] for path in self.paths})
        return self.lm(params, block, None, wants=Wants(logits=True)).logits, None


def target_of(flat: Mapping[tuple, Array]) -> PyTree:
    """The target's parameters from the state of an `Actor`, flat by path."""
    return unflatten_dict({_path(path[1]): leaf for path, leaf in flat.items()})


def _named(path: tuple) -> str:
    return "/".join(map(str, path))


def _path(name: str) -> tuple:
    return tuple(int(part) if part.isdigit() else part for part in name.split("/"))


@dataclasses.dataclass
class Output:
    """What Tunix reads of a call; the fields of its `RolloutOutput`.

    Attributes:
      text: a completion per prompt, without its end of text.
      logits: None.
      tokens: their ids, `[n]` each.
      left_padded_prompt_tokens: `[B, P]`.
      logprobs: `[n]` float32 each, after the temperature and before any cut; None if they were not asked for.
    """

    text: list[str]
    logits: None
    tokens: list[np.ndarray]
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray] | None


class TunixRollout:
    """The rollout engine, as `engine` hands it to Tunix.

    Tunix repeats each prompt by itself. Runs of equal prompts are read once.

    Tunix makes it with the module that it trains, and hands new weights on only to an engine with another module. So
    `model` is another one. The first call takes what the trainer's module has by then, such as a checkpoint's weights.

    Args:
      rollout_actor: the module that is trained; its state holds the target's parameters.
      tokenizer: with `encode`, `decode`, `bos_id`, `eos_id` and `pad_id`, as Tunix wraps every tokenizer.
      mesh: Tunix's; the decoder's own mesh counts.
      rollout_config: Tunix's `RolloutConfig`.
      decoder: decodes.
      others: entries of the decoder's `params` besides `target`, such as `{"draft": ...}`.
      target: makes the target's parameters from the actor's state, a dict of arrays by path.
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: Any = None,
        decoder: Speculative,
        others: Mapping[str, PyTree] | None = None,
        target: Callable[[Mapping[tuple, Array]], PyTree] = target_of,
    ):
        self.decoder, self.tokenizer, self.target = decoder, tokenizer, target
        self.mesh = decoder.mesh
        self.calls = 0
        self.temperature = getattr(rollout_config, "temperature", 1.0)
        self._trained: nnx.Module | None = rollout_actor
        self._others = {"draft": None, **(others or {})}
        graph, state = nnx.split(rollout_actor)
        self._actor = nnx.merge(graph, jax.tree.map(jnp.copy, state))
        dtype = getattr(rollout_config, "data_type", None)
        typed = lambda x: x if dtype is None else x.astype(dtype)
        self.params = self._placed(jax.tree.map(typed, target(_flat(nnx.state(self._actor, nnx.Param)))))

    def generate(self, prompts: list[str], rollout_config: Any, **more: Any) -> Output:
        """Samples a completion of each prompt.

        Without a seed, the number of the call is the seed: two calls with the same prompts give other texts.

        Args:
          prompts: B texts.
          rollout_config: Tunix's `RolloutConfig`.
          **more: nothing is read.
        """
        self._begin()
        config, ids = rollout_config, [self._encode(text) for text in prompts]
        width = _columns(ids, config.max_prompt_length)
        pad = self.pad_id()
        ends = [int(token) for token in config.eos_tokens or [self.eos_id()]]
        self.temperature, seed = config.temperature, self.calls if config.seed is None else _seed(config.seed)
        self.calls += 1
        given = Prompts.of(
            ids,
            config.max_tokens_to_generate,
            seed=seed,
            eos=ends,
            temperature=config.temperature,
            top_k=max(config.top_k or 0, 0),
            top_p=1.0 if config.top_p is None else config.top_p,
        )
        wide = jnp.pad(given.tokens, ((0, 0), (0, width - given.tokens.shape[1])))
        needed = self.decoder.buffer(width + config.max_tokens_to_generate + self.decoder.slack)
        names = ("tempered",) if config.return_logprobs else ()
        found = rollout(
            self.decoder,
            self.params,
            dataclasses.replace(given, tokens=wide),
            group=_group(ids),
            capacity=needed,
            logprobs=names,
        )
        tokens, logprobs = self._without_end(found, config.max_tokens_to_generate)
        left = np.full((len(ids), width), pad, np.int32)
        for row, own in zip(left, ids, strict=True):
            row[width - len(own) :] = own
        text = [self.tokenizer.decode(own.tolist()) for own in tokens]
        return Output(text, None, tokens, left, logprobs)

    def get_per_token_logps(self, prompt_tokens: Array, completion_tokens: Array) -> Array:
        """The log-probabilities of completions `[B, T]` after the last call's temperature, which are `generate`'s.

        Args:
          prompt_tokens: `[B, P]`, padded on the left.
          completion_tokens: `[B, T]`, padded on the right; what stands at padding means nothing.
        """
        self._begin()
        heat = jnp.float32(self.temperature)
        return _scores(
            self.decoder.target, self.params["target"], prompt_tokens, completion_tokens, self.pad_id(), heat
        )

    def update_params(self, params: PyTree, filter_types: Sequence[Any] | None = None) -> None:
        """Takes new parameters in the types and places of the old ones, so that nothing is compiled again.

        Args:
          params: a state of the actor, or a part of one; others stay as they are.
          filter_types: not needed, since every array says where it belongs.

        Raises:
          ValueError: for an array that the actor's state does not have.
        """
        self._begin()
        new, own = _flat(params), _flat(nnx.state(self._actor, nnx.Param))
        if unknown := [path for path in new if path not in own]:
            raise ValueError(
                f"the actor has no parameter {_named(unknown[0])}: pass a state of the actor, or a part of it"
            )
        nnx.update(self._actor, params)
        put = lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding)
        self.params = {**self.params, "target": jax.tree.map(put, self.target({**own, **new}), self.params["target"])}

    def pad_id(self) -> int:
        """The id of padding."""
        return self.tokenizer.pad_id()

    def eos_id(self) -> int:
        """The id of an end of text."""
        return self.tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """A module like the one that is trained, with the weights of the last update."""
        return self._actor

    def _begin(self):
        """Takes the weights of the trainer's module, once."""
        if self._trained is not None:
            trained, self._trained = self._trained, None
            self.update_params(nnx.state(trained, nnx.Param))

    def _placed(self, target):
        """The decoder's parameters where they stay, committed to these devices as later ones are."""
        params = {**self._others, "target": target}
        stays = lambda x: jax.device_put(x, x.sharding)
        return jax.tree.map(stays, params) if self.mesh is None else reshard(self.decoder, params)

    def _encode(self, text):
        """A prompt's ids, with one BOS if the tokenizer has one."""
        ids, bos = list(self.tokenizer.encode(text)), self.tokenizer.bos_id()
        while bos and ids[:1] == [bos]:
            ids = ids[1:]
        return [bos, *ids] if bos else ids

    def _without_end(self, found: Rollout, width):
        """The completions' ids and log-probabilities on the host, without ends of text."""
        own = found.completions(width, end=False)
        tokens, counts, logprobs = jax.device_get((own.tokens, own.mask.sum(axis=1), own.logprobs))
        cut = lambda rows: [row[:count] for row, count in zip(rows, counts, strict=True)]
        return cut(tokens), cut(logprobs["tempered"]) if logprobs else None


def engine(
    decoder: Speculative,
    others: Mapping[str, PyTree] | None = None,
    target: Callable[[Mapping[tuple, Array]], PyTree] = target_of,
) -> Callable[..., Any]:
    """What Tunix's `ClusterConfig(rollout_engine=...)` takes.

    Args:
      decoder: see `TunixRollout`.
      others: see `TunixRollout`.
      target: see `TunixRollout`; the default reads the state of an `Actor`.

    Raises:
      ImportError: without the package `google-tunix`.
    """
    from tunix.rl.rollout.base_rollout import BaseRollout

    registered = type("TunixRollout", (TunixRollout, BaseRollout), {"__doc__": TunixRollout.__doc__})
    return functools.partial(registered, decoder=decoder, others=others, target=target)


@functools.partial(jax.jit, static_argnums=(0, 4))
@settled
def _scores(lm, params, prompts, completions, pad, heat):
    """Log-probabilities `[B, T]` of completions after prompts that are padded on the left; nothing sees the padding."""
    size, width = prompts.shape[1], completions.shape[1]
    padded = jnp.sum(jnp.cumprod(prompts == pad, axis=1), axis=1)
    both = jnp.concatenate([prompts, completions], axis=1)
    at = padded[:, None] + jnp.arange(size + width)[None]
    text = jnp.take_along_axis(both, at, axis=1, mode="clip")
    found = token_logprobs(lm, params, text, temperature=jnp.broadcast_to(heat, (len(text),)))
    return jnp.take_along_axis(found, (size - padded)[:, None] + jnp.arange(width)[None], axis=1)


def _flat(state: Any) -> dict[tuple, Array]:
    """The arrays of a state or of nested dicts, by path."""
    nested: Any = nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state
    return dict(flatten_dict(nested))


def _columns(ids, most):
    """The columns of prompts: Tunix's maximum, or the power of two that the longest needs."""
    longest = max(map(len, ids))
    return most if longest <= most else 1 << (longest - 1).bit_length()


def _seed(seed: Any) -> int:
    """A seed as a number, from a number or a key."""
    if jnp.issubdtype(getattr(seed, "dtype", np.dtype(int)), jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = [int(word) for word in np.asarray(seed).ravel()]
    return functools.reduce(lambda total, word: (total << 32) + word, words, 0)


def _group(ids: Sequence[Sequence[int]]) -> int:
    """The largest G such that every G rows that follow each other are equal."""
    run = next((i for i, own in enumerate(ids) if own != ids[0]), len(ids))
    even = lambda size: len(ids) % size == 0 and all(own == ids[i // size * size] for i, own in enumerate(ids))
    return next(size for size in range(run, 0, -1) if even(size))
