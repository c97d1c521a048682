"""PAT: a narrower model is cut out of a larger one, by one mask over channels that all layers share (arXiv:2408.14721).

In the shape descriptions `E` denotes the model's width, `d` how many channels are to be kept, `r` the rank of a hybrid
module, `V` the vocabulary.

A hybrid module follows the embedding, and each attention and feed-forward before it is added to the stream. It is
`h <- scale * s * (h + W1 W0 h)`, which is linear. So it is folded into the matrix before it, and the masked model is a
model of the same parts with other parameters.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import LlamaLM, kv_heads, lora
from specjax.models.attention import AttentionConfig
from specjax.models.embedding import EmbeddingConfig
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import HeadConfig
from specjax.objectives.base import Objective, Recipe
from specjax.objectives.means import MEAN
from specjax.objectives.next_token import NextToken
from specjax.sharding.rules import replicated

Array = jax.Array
PyTree = Any

HELD = 0.8
"""The share of updates after which the mask stays as it is."""
_EXPONENT = 10.0
"""The most that the exponent of a sigmoid may be, as released."""


@dataclasses.dataclass(frozen=True)
class Pat(Objective):
    """The text's own tokens under the masked model, plus losses that bring the mask to `width` channels.

    Parameters are {`mask` `[E]`, `adapter`: low-rank changes of the model (`specjax.models.lora`), `modules`: the hybrid
    ones}. A module is {`into` `[r, E]` (W0), `out_of` `[E, r]` (W1), `scale` `[E]`}.

    The released training drops 5% of the inputs of low-rank changes, which changes that are merged cannot do.

    Attributes:
      lm: the model.
      width: d; 0: three quarters of E.
      rank: r.
      lora_rank: of the low-rank changes.
      lora_alpha: they are scaled by `lora_alpha / lora_rank`.
      reach: how far the mask could come in a run at its highest learning rate, which is `reach / updates`. By default it
        is that of the authors' run: 10,000 updates at 5e-5.
      updates: G, of the whole run; None: of no run, and the mask is as it will be written.
      learning_rate: the highest one of the other parameters, which the mask's is a multiple of; with `updates`.

    Raises:
      ValueError: on numbers that are not possible, or a model that cannot be cut in this way.
    """

    recipe = Recipe(clip=0.3)

    lm: LlamaLM
    width: int = 0
    rank: int = 200
    lora_rank: int = 20
    lora_alpha: float = 4.0
    reach: float = 0.5
    updates: int | None = None
    learning_rate: float | None = None

    def __post_init__(self):
        check_parts(self.lm)
        for name in ("rank", "lora_rank", "lora_alpha", "reach"):
            if not getattr(self, name) > 0:
                raise ValueError(f"pat: {name} must be above 0, got {getattr(self, name)}")
        if self.updates is not None and self.updates < 2:
            raise ValueError("pat: the mask moves over at least 2 steps: give more --steps")
        size = self.lm.config.hidden_size
        if not 0 <= self.width < size:
            raise ValueError(
                f"pat: width must be from 1 to {size - 1}, as the model has {size} channels, not {self.width}"
            )
        if self.rank > size:
            raise ValueError(f"pat: rank {self.rank} is more than the model's {size} channels: give less")

    @property
    def kept(self) -> int:
        """d."""
        return self.width or self.lm.config.hidden_size * 3 // 4

    @property
    def open(self) -> LlamaLM:
        """The model with a head of its own: the table of embeddings is changed for the inputs alone."""
        return dataclasses.replace(self.lm, config=self.lm.config.every(HeadConfig, tied=False))

    @property
    def narrow(self) -> LlamaLM:
        """The model that is written."""
        return dataclasses.replace(self.open, config=dataclasses.replace(self.open.config, hidden_size=self.kept))

    @property
    def rates(self):
        if self.updates is None or self.learning_rate is None:
            return {}
        return {"mask": self.reach / (self.updates * self.learning_rate)}

    def param_shardings(self, mesh, params):
        return replicated(mesh, params)

    def init(self, key, target_params):
        """A mask of zeros, and changes and modules that change nothing yet."""
        config, keys = self.lm.config, iter(jax.random.split(key, 2 * self.lm.num_layers + 2))
        bound = config.hidden_size**-0.5

        def module():
            into = jax.random.uniform(next(keys), (self.rank, config.hidden_size), minval=-bound, maxval=bound)
            return {"into": into, "out_of": jnp.zeros(into.shape[::-1]), "scale": jnp.ones(into.shape[1:])}

        whole = lambda params: kv_heads.merged(params, self.lm.config, self.lm.kv_copies)
        adapter = lora.fresh(next(keys), jax.eval_shape(whole, target_params), self.lora_rank)
        layers = {i: {"attention": module(), "mlp": module()} for i in range(self.lm.num_layers)}
        mask = jnp.zeros((config.hidden_size,))
        return {
            "mask": mask,
            "adapter": {name: own for name, own in adapter.items() if name == "layers"},
            "modules": {"embed": module(), "layers": layers},
        }

    def chosen(self, mask: Array) -> Array:
        """Which channels are kept, `[E]` bool: the `width` ones of the largest mask, the first ones of equal ones.

        The released script keeps those above 0. They are the same ones if the loss of the count is 0 at the end. A run
        of few updates may end with another count, since all channels begin at 0 and are pushed alike.
        """
        order = jnp.argsort(-mask, stable=True)
        return jnp.zeros(mask.shape, bool).at[order[: self.kept]].set(True)

    def switch(self, mask: Array, done: Array | None) -> Array:
        """s `[E]`, what each channel is multiplied by.

        Args:
          mask: `[E]`.
          done: the share of updates that were made; None: 1 for a channel that is kept and 0 for the others.
        """
        if done is None or self.updates is None:
            return self.chosen(mask).astype(jnp.float32)
        step, last = done * self.updates, float(int(HELD * self.updates))
        mask = jnp.where(step < last, mask, jax.lax.stop_gradient(mask))
        sharp = jnp.log(jnp.maximum(jnp.minimum(step, last), 1.0)) / jnp.log(float(self.updates))
        exponent = jnp.minimum(-mask / (1.0 - sharp + 1e-6), _EXPONENT)
        return 1.0 / (1.0 + jnp.exp(exponent)) + jnp.maximum(0.5 - done, 0.0)

    def masked(self, params: PyTree, target_params: PyTree, switch: Array) -> PyTree:
        """The parameters of `open` that compute what the model with its modules does.

        Args:
          params: the trained ones.
          target_params: the model's own.
          switch: s, `[E]`.
        """
        spread = lambda own: kv_heads.copied(own, self.lm.config, self.lm.kv_copies)
        whole = lora.added(target_params, params["adapter"], self.lora_alpha / self.lora_rank, spread)
        through = lambda module, own: jax.tree.map(lambda x: _through(module, x, switch), own)
        layers = {}
        for i, layer in whole["layers"].items():
            own = params["modules"]["layers"][i]
            attention = {**layer["attention"], "o": through(own["attention"], layer["attention"]["o"])}
            mlp = {**layer["mlp"], "down": through(own["mlp"], layer["mlp"]["down"])}
            layers[i] = {**layer, "attention": attention, "mlp": mlp}
        head = whole["head"] if "head" in whole else {"kernel": whole["embed"]["embedding"].T}
        embed = through(params["modules"]["embed"], whole["embed"])
        return {**whole, "embed": embed, "layers": layers, "head": head}

    def loss(self, params, target_params, batch, key, mean=MEAN):
        """The text's loss in nats and, in training, those of the mask and of the modules.

        `kept` is how many channels have a mask above 0, which comes to `width` in a run that is long enough."""
        own = self.masked(
            params, target_params, self.switch(params["mask"], None if batch.done is None else batch.done[0])
        )
        loss, metrics = NextToken(self.open).loss(own, None, batch, key, mean)
        due = batch.due(1)
        metrics = metrics | {"kept": mean(jnp.full(due.shape, (params["mask"] > 0).sum(), jnp.float32), due)}
        if batch.done is None:
            return loss, metrics
        modules = jax.tree.leaves(params["modules"], is_leaf=lambda x: isinstance(x, dict) and "into" in x)
        more = of_mask(params["mask"], self.kept) + sum(of_module(one["into"]) for one in modules)
        return loss + more * mean(jnp.ones(due.shape), due), metrics

    def cut(self, params: PyTree, target_params: PyTree) -> tuple[LlamaLM, PyTree]:
        """The narrow model: its functions, and parameters whose logits are those of the masked model.

        A norm's mean square is over fewer channels, so the stream is scaled by `sqrt(d / E)` and the norms' scales by its
        inverse. The published script scales the norms alone, so its `eps` counts for another share of the mean square. It
        also leaves the modules' `scale` out.

        Args:
          params: the trained parameters.
          target_params: the model's own.
        """
        keep = np.flatnonzero(np.asarray(self.chosen(jnp.asarray(params["mask"]))))
        wide = self.masked(params, target_params, self.switch(params["mask"], None))
        root = np.sqrt(len(keep) / self.lm.config.hidden_size)
        scaled = lambda x, factor: (x[..., keep].astype(jnp.float32) * np.float32(factor)).astype(x.dtype)
        inputs = lambda own: {**own, "kernel": own["kernel"][keep]}
        outputs = lambda own: jax.tree.map(lambda x: scaled(x, root), own)
        norm = lambda own: {"scale": scaled(own["scale"], 1 / root)}

        def part(own: PyTree, last: str) -> PyTree:
            """Of an attention or an MLP: its last product gives fewer channels, and the others read fewer."""
            products = {name: inputs(one) for name, one in own.items() if "kernel" in one and name != last}
            return {**own, **products, last: outputs(own[last])}

        def layer(own: PyTree) -> PyTree:
            parts = {"attention": part(own["attention"], "o"), "mlp": part(own["mlp"], "down")}
            return {**own, **parts, **{name: norm(own[name]) for name in ("attention_norm", "mlp_norm")}}

        narrow = {
            "embed": outputs(wide["embed"]), "layers": {i: layer(own) for i, own in wide["layers"].items()},
            "norm": norm(wide["norm"]), "head": inputs(wide["head"]),
        }  # fmt: skip
        return self.narrow, narrow


def _through(module: PyTree, x: Array, switch: Array) -> Array:
    """A matrix `[..., E]` (or a bias `[E]`) followed by a module."""
    wide = x.astype(jnp.float32)
    inside = jnp.einsum("...e,re->...r", wide, module["into"], precision="highest")
    wide = wide + jnp.einsum("...r,er->...e", inside, module["out_of"], precision="highest")
    factors = (module["scale"] * switch).reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * factors).astype(x.dtype)


def of_mask(mask: Array, kept: int) -> Array:
    """The loss of a mask `[E]` that is to keep so many channels, each at 0.5 and the others at -0.5."""
    chosen = mask + jax.lax.stop_gradient((mask >= 0).astype(mask.dtype) - mask)
    average = lambda x, where: jnp.where(where, x, 0.0).sum() / jnp.maximum(where.sum(), 1)
    near = average(jnp.square(mask - 0.5), mask > 0) + average(jnp.square(mask + 0.5), mask <= 0)
    return 10.0 * jnp.abs(chosen.sum() - kept) / kept + near


def of_module(into: Array) -> Array:
    """How far the rows of W0 `[r, E]` are from orthonormal ones: the mean square of `W0 W0^T - I`."""
    return jnp.mean(jnp.square(jnp.einsum("re,se->rs", into, into, precision="highest") - jnp.eye(len(into))))


def check_parts(lm: Any) -> None:
    """Raises ValueError on a model whose channels cannot be cut out everywhere."""
    config = lm.config
    plain = lambda one: one == LayerConfig(one.mixer, one.feed, one.norm)
    kinds = lambda one: isinstance(one.mixer, AttentionConfig) and isinstance(one.feed, MLPConfig)
    norms = (config.norm, *(one.norm for one in config.layers))
    normed = all(not one.mean and one.kind in ("rounded", "wide") for one in norms)
    ends = config.embedding == EmbeddingConfig(config.vocab_size) and config.head == HeadConfig(config.head.tied)
    alone = config.encoder is None and config.distances is None
    if not (alone and ends and normed and all(plain(one) and kinds(one) for one in config.layers)):
        raise ValueError(
            "pat cuts models like Llama and Qwen: layers of attention and one MLP, each after an RMS norm with scales, and no "
            "factors, further norms or inputs"
        )
