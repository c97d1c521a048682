"""Mixtures of experts: routers that choose experts for each token, and MLPs over exactly the tokens routed to them.

Shapes: `M` tokens of all rows, `E` width, `X` experts, `k` experts per token, `F` an expert's inner width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.lm import Block
from specjax.models.block_choice import limited
from specjax.models.compressed import changed
from specjax.models.grouped import grouped_dot
from specjax.models.hobbit.tiers import Tiered, Tiers
from specjax.models.linear import Linear
from specjax.models.mlp import ACTIVATIONS, Activation, MLPConfig
from specjax.models.own_experts import in_turns
from specjax.sharding.ambient import known_mesh
from specjax.sharding.rules import RULES, partition, parts, whole_experts

Array = jax.Array
Scoring = Literal["softmax", "sigmoid", "biased", "chosen", "sparsemixer", "inputs"]


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Experts, and how a token chooses among them; names follow Hugging Face's `config.json`.

    Attributes:
      num_experts: X.
      num_experts_per_tok: k.
      moe_intermediate_size: F.
      scoring: how a router's logits become scores. `softmax` is over all experts, and the k best are chosen
        (Qwen3-MoE). `sigmoid` chooses the best sums of score and learned bias, and the bias does not count in the
        weights (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). `biased` does so with a softmax over all (ERNIE 4.5).
        `chosen` takes the k best logits, which have a bias, and then a softmax over those (gpt-oss). `sparsemixer` takes
        the two best logits, one after the other; see `mixed_sparsely`. `inputs` takes the k best logits, and the sigmoid of
        each multiplies what its expert reads, not what that gives (Llama 4).
      norm_topk_prob: whether a token's k weights, the scores, are divided by their sum.
      least_sum: what this sum is at least taken for.
      added_sum: what is added to it (LFM2).
      routed_scaling_factor: a factor of the weights, applied after that.
      n_group: the number of groups of adjacent experts.
      topk_group: how many groups a token chooses from: those with the largest total of their best sums.
      group_best: of how many best sums that total is; DeepSeek-V2 has 1.
      shared: further experts that every token uses, as one MLP of their common width; None: there are none.
      shared_gate: whether a learned sigmoid of the token multiplies what those give (Qwen2-MoE).
      router_jitter_noise: see `mixed_sparsely`.
      dense: the MLP of the model's layers without experts, or the file's description of it where all layers have
        experts. It is not computed here; drafters' layers take its width.
      swiglu_limit: if given, the limit of the gates and inputs of `ClampedExperts`.
      swiglu_alpha: the steepness of their gates.
      ungated: the activation of experts without a gate (Nemotron-H); None: they have one, a SiLU.
      latent_size: the width of what experts read and give, between two further products; None: the model's.
      first_rank: the rank of the first of a token's k experts, counted from 1, the best. The others follow it in the order
        of choice. Weights that are divided by a sum are divided by that of these k (`specjax.models.routing`).
      auxiliary: how many of a token's k experts, the last in the order of choice, are not computed. Their weights are lost: the
        others keep those that they have among all k.
      vectors: whether learned vectors stand for the auxiliary experts (`specjax.models.compressed`).
      capacity: how many experts a block of tokens chooses, among which its tokens choose (`specjax.models.block_choice`),
        in place of groups; 0: tokens choose by themselves.
      block_size: the length of such a block, in tokens of the text.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring: Scoring = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_best: int = 2
    shared: MLPConfig | None = None
    shared_gate: bool = False
    least_sum: float = 1e-20
    added_sum: float = 0.0
    router_jitter_noise: float = 0.01
    dense: MLPConfig | None = dataclasses.field(default=None, compare=False)
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    ungated: Activation | None = None
    latent_size: int | None = None
    first_rank: int = 1
    auxiliary: int = 0
    vectors: bool = False
    capacity: int = 0
    block_size: int = 0

    @property
    def main(self) -> int:
        """The number of a token's experts that are computed, its first in the order of choice."""
        return self.num_experts_per_tok - self.auxiliary

    @property
    def last_rank(self) -> int:
        """The rank of the last of a token's experts."""
        return self.first_rank - 1 + self.num_experts_per_tok

    def uncompressed(self, width: int) -> str:
        """Why vectors cannot stand for experts of a model of `width`; empty if they can."""
        reasons = {
            "experts without a gate": self.ungated is not None,
            "clamped experts": self.swiglu_limit is not None,
            "experts whose inputs are weighted": self.scoring == "inputs",
            "experts in a narrower space": self.latent_size is not None,
            f"experts wider ({self.moe_intermediate_size}) than the model ({width})": self.moe_intermediate_size
            > width,
        }
        return next((reason for reason, has in reasons.items() if has), "")

    @property
    def choices(self) -> int:
        """The number of experts that a token chooses from: those of its groups, or of its block."""
        return self.capacity or self.num_experts // self.n_group * self.topk_group

    @property
    def biased(self) -> bool:
        """Whether a learned bias takes part in the choice."""
        return self.scoring not in ("softmax", "sparsemixer", "inputs")

    @property
    def num_shared_experts(self) -> int:
        """The width of the shared experts, in experts."""
        return 0 if self.shared is None else self.shared.intermediate_size // self.moe_intermediate_size

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs) -> "SparseMLP":
        """The module, for a model of `width`."""
        return SparseMLP(self, width, dtype, rngs)

    @property
    def axis_counts(self) -> dict[str, int]:
        """The sizes that decide how a mesh splits experts; see `specjax.sharding.rules.partition`."""
        return {"expert": self.num_experts, "expert_mlp": self.moe_intermediate_size}


def route(logits: Array, bias: Array | None, config: ExpertsConfig, block: Block | None = None) -> tuple[Array, Array]:
    """The weights and experts, `[M, k]` each, from a router's logits `[M, X]` in float32.

    Args:
      logits: of the pass's tokens.
      bias: `[X]`, or None.
      config: how a token chooses.
      block: the pass; needed only if tokens choose with their block (`ExpertsConfig.capacity`).

    Raises:
      ValueError: if tokens choose with their block, and the pass does not show them their block.
    """
    c = config
    if c.scoring == "chosen":
        best, experts = of_ranks(logits if bias is None else logits + bias.astype(jnp.float32)[None], c)
        return jax.nn.softmax(best, axis=-1), experts
    if c.scoring == "inputs":
        best, experts = of_ranks(logits, c)
        return jax.nn.sigmoid(best), experts
    if c.scoring == "sparsemixer":
        weights, experts = mixed_sparsely(logits, c.router_jitter_noise, c.last_rank)
        return weights[:, c.first_rank - 1 :], experts[:, c.first_rank - 1 :]
    scores = jax.nn.sigmoid(logits) if c.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    ranked = scores if bias is None else scores + bias.astype(jnp.float32)[None]
    if c.capacity:
        if block is None:
            raise ValueError(f"tokens choose experts in blocks of {c.block_size}, and it is not said where they are")
        ranked = limited(ranked, block, c.block_size, c.capacity)
    elif c.n_group > 1:
        groups = ranked.reshape(ranked.shape[0], c.n_group, -1)
        worth = jax.lax.top_k(groups, c.group_best)[0].sum(axis=-1)
        best = jax.lax.top_k(worth, c.topk_group)[1]
        kept = jnp.any(best[:, :, None] == jnp.arange(c.n_group)[None, None], axis=1)
        ranked = jnp.where(kept[:, :, None], groups, -jnp.inf).reshape(ranked.shape)
    experts = of_ranks(ranked, c)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if c.norm_topk_prob:
        weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True) + c.added_sum, c.least_sum)
    return weights * c.routed_scaling_factor, experts


def of_ranks(scores: Array, config: ExpertsConfig) -> tuple[Array, Array]:
    """The scores and experts, `[M, k]` each, of a token's ranks among scores `[M, X]`, the best first."""
    best, experts = jax.lax.top_k(scores, config.last_rank)
    return best[:, config.first_rank - 1 :], experts[:, config.first_rank - 1 :]


def mixed_sparsely(logits: Array, noise: float, count: int = 2) -> tuple[Array, Array]:
    """The weights and experts `[M, count]` of SparseMixer-2 without its noise (Liu et al. 2024, arXiv:2409.12136).

    The first expert is the one of the greatest logit m. Its weight is that of a softmax over the logits s that are near,
    `(m - s) / max(|s|, m) <= 2 noise`. The second is chosen and weighted likewise among the others, as is each later one. The
    weights do not sum to 1.

    Args:
      logits: `[M, X]` in float32.
      noise: the relative noise of logits in training, `router_jitter_noise`.
      count: how many experts; models have 2.
    """
    left, weights, experts = logits, [], []
    for _ in range(count):
        best = jnp.argmax(left, axis=-1, keepdims=True)
        most = jnp.take_along_axis(left, best, axis=-1)
        far = (most - logits) / jnp.maximum(jnp.abs(logits), most) > 2 * noise
        weights.append(jnp.take_along_axis(jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1), best, axis=-1))
        experts.append(best)
        left = jnp.where(jnp.arange(logits.shape[-1])[None] == best, -jnp.inf, left)
    return jnp.concatenate(weights, axis=-1), jnp.concatenate(experts, axis=-1)


def mixed(own: Any, x: Array, weights: Array, experts: Array, inputs: bool = False) -> Array:
    """Tokens `[M, E]` through their experts `[M, k]`, summed by weight `[M, k]`.

    Tokens are sorted by expert and multiplied group by group. No token is dropped or padded, whatever the length of a
    group, and a token's result does not depend on the experts of other tokens.

    The ambient mesh may give every device some whole experts (`specjax.sharding.rules.whole_experts`). Then a device
    applies its experts to all tokens of its rows, and the devices' sums are added.

    Args:
      own: an `nnx.Module`, whose parameters all lead with X, and whose `down.kernel` is `[X, F, E]`. Its `mlp` takes
        tokens `[R, E]`, sorted by expert, and the number of each expert's tokens `[X]`, and returns `[R, E]`.
      x: the tokens.
      weights: in float32.
      experts: int32.
      inputs: whether the weights multiply what experts read, and not what they give.
    """
    kernel = own.down.kernel.get_value()
    count, inner, _ = kernel.shape
    mesh = known_mesh()
    if isinstance(kernel, Tiered):
        if mesh is not None and mesh.size > 1:
            raise ValueError("experts in two precisions (weights='hobbit') are for one device: leave the mesh out")
        return _in_tiers(own, x, weights, experts, kernel.tiers, inputs)
    if mesh is None or not whole_experts(mesh, count, inner):
        return _summed(x, weights, experts, count, own.mlp, inputs)
    graph, params = nnx.split(own)
    axis, rows = RULES["expert"], partition(mesh, ("batch", None), x.shape, {})
    devices = parts(mesh, "expert")
    number = count // devices
    apply = lambda params, x, sizes: nnx.merge(graph, params).mlp(x, sizes)

    def whole(params, x, weights, experts):
        def mlp(x, sizes):
            here = (jnp.arange(x.shape[0]) < sizes[:number].sum())[:, None]
            # later rows belong to other devices' experts; a product and its derivative leave them undefined
            return jnp.where(here, apply(params, jnp.where(here, x, 0), sizes[:number]), 0)

        return _summed(x, weights, experts, count, mlp, inputs)

    def part(params, x, weights, experts):
        own_first = (experts - jax.lax.axis_index(axis) * number) % count
        return jax.lax.psum(in_turns(apply, whole, number, devices, inputs)(params, x, weights, own_first), axis)

    given = jax.P(axis), rows, rows, rows
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.shard_map(part, in_specs=given, out_specs=rows, check_vma=False)(params, x, weights, experts)


def _in_tiers(own: Any, x: Array, weights: Array, experts: Array, tiers: Tiers, inputs: bool) -> Array:
    """See `mixed`; of matrices in two precisions, `tiers` chooses one for each expert of a token, or none."""
    count = own.down.kernel.get_value().shape[0]
    weights, groups = tiers.grouped(weights, experts, count)

    def mlp(x: Array, sizes: Array) -> Array:
        here = (jnp.arange(x.shape[0]) < sizes.sum())[:, None]
        return jnp.where(here, own.mlp(x, sizes), 0)  # skipped ones come last

    return _summed(x, weights, groups, 2 * count, mlp, inputs)


def _summed(
    x: Array, weights: Array, experts: Array, count: int, mlp: Callable[[Array, Array], Array], inputs: bool
) -> Array:  # fmt: skip
    """See `mixed`; `mlp` takes the tokens `[M k, E]` of all `count` experts."""
    tokens, each = experts.shape
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.zeros((count,), jnp.int32).at[chosen].add(1, mode="drop")
    read = x[order // each]
    read = read * weights.reshape(-1)[order][:, None].astype(x.dtype) if inputs else read
    out = mlp(read, sizes)[jnp.argsort(order)].reshape(tokens, each, -1).astype(jnp.float32)
    return jnp.sum(out if inputs else out * weights[:, :, None], axis=1).astype(x.dtype)


class Kernel(nnx.Module):
    """A matrix for every expert, `[X, inputs, outputs]`."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal(batch_axis=0)(rngs.params(), shape, dtype))


class Router(nnx.Module):
    """Chooses experts. Products, scores and the bias are float32, whatever the type of the other parameters."""

    def __init__(self, config: ExpertsConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (width, config.num_experts), dtype))
        if config.biased:
            self.bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))
        self.config = config

    def __call__(self, x: Array, block: Block | None = None) -> tuple[Array, Array]:
        """See `route`, of tokens `[M, E]`."""
        logits = jnp.einsum("me,ex->mx", x, self.kernel[...], preferred_element_type=jnp.float32)
        return route(logits, self.bias[...] if self.config.biased else None, self.config, block)


class Experts(nnx.Module):
    """MLPs, with or without gates, each over the tokens that chose it; see `mixed`."""

    def __init__(self, config: ExpertsConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        X, F = config.num_experts, config.moe_intermediate_size  # noqa: N806
        if config.ungated is None:
            self.gate = Kernel((X, width, F), dtype, rngs)
        self.up = Kernel((X, width, F), dtype, rngs)
        self.down = Kernel((X, F, width), dtype, rngs)
        self.inputs, self.ungated = config.scoring == "inputs", config.ungated

    def __call__(self, x: Array, weights: Array, experts: Array) -> Array:
        return mixed(self, x, weights, experts, self.inputs)

    def mlp(self, x: Array, sizes: Array) -> Array:
        """Tokens sorted by expert, `sizes` `[X]` of which each has."""
        up, down = self.up.kernel.get_value(), self.down.kernel.get_value()
        inner = grouped_dot(x, up, sizes)
        if self.ungated is None:
            inner = nnx.silu(grouped_dot(x, self.gate.kernel.get_value(), sizes)) * inner
        else:
            inner = ACTIVATIONS[self.ungated](inner)
        return grouped_dot(inner, down, sizes)


class CompressedExperts(Experts):
    """Experts that read what `specjax.models.compressed.changed` makes of tokens."""

    def mlp(self, x: Array, sizes: Array) -> Array:
        """Rows `[R, 2 E + F]`, sorted by expert, `sizes` `[X]` of which each has; gives `[R, E]`."""
        gate, up = self.gate.kernel.get_value(), self.up.kernel.get_value()
        width = up.shape[1]
        of_gate, of_up, between = jnp.split(x, (width, 2 * width), axis=-1)
        inner = nnx.silu(grouped_dot(of_gate, gate, sizes)) * grouped_dot(of_up, up, sizes)
        return grouped_dot(inner * between, self.down.kernel.get_value(), sizes)


class Affine(nnx.Module):
    """A matrix for every expert, `[X, inputs, outputs]`, and a bias, `[X, outputs]`."""

    def __init__(self, shape: tuple[int, int, int], dtype: Any, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal(batch_axis=0)(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros((shape[0], shape[2]), dtype))

    def __call__(self, x: Array, sizes: Array) -> Array:
        """Tokens sorted by expert, `sizes` `[X]` of which each has, or `[2 X]`: see `Tiers.grouped`."""
        own = self.bias[...]
        own = jnp.tile(own, (sizes.shape[0] // own.shape[0], 1))
        bias = jnp.repeat(own, sizes, axis=0, total_repeat_length=x.shape[0])
        return grouped_dot(x, self.kernel.get_value(), sizes) + bias


class ClampedExperts(nnx.Module):
    """gpt-oss' experts: `down((up + 1) * gate * sigmoid(alpha * gate))`.

    Gates and ups are kept within a limit. One matrix makes both, alternately."""

    def __init__(self, config: ExpertsConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        X, F = config.num_experts, config.moe_intermediate_size  # noqa: N806
        assert config.swiglu_limit is not None, "experts without a limit are Experts"
        self.gate_up = Affine((X, width, 2 * F), dtype, rngs)
        self.down = Affine((X, F, width), dtype, rngs)
        self.limit, self.alpha = config.swiglu_limit, config.swiglu_alpha

    def __call__(self, x: Array, weights: Array, experts: Array) -> Array:
        return mixed(self, x, weights, experts)

    def mlp(self, x: Array, sizes: Array) -> Array:
        """Tokens sorted by expert, `sizes` `[X]` of which each has."""
        both = self.gate_up(x, sizes)
        gate, up = jnp.minimum(both[:, ::2], self.limit), jnp.clip(both[:, 1::2], -self.limit, self.limit)
        return self.down((up + 1) * gate * nnx.sigmoid(self.alpha * gate), sizes)


class SparseMLP(nnx.Module):
    """The experts of a layer, in place of its MLP."""

    def __init__(self, config: ExpertsConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        self.router = Router(config, width, dtype, rngs)
        kind = Experts if config.swiglu_limit is None else ClampedExperts
        latent = config.latent_size
        if config.vectors:
            assert not config.uncompressed(width), "such vectors are refused before"
            self.ces = nnx.Param(jnp.ones((config.num_experts, 3, width), dtype))
            kind = CompressedExperts if config.auxiliary else kind
        self.experts = kind(config, latent or width, dtype, rngs)
        if latent is not None:
            linear = lambda inputs, outputs: Linear(
                inputs, outputs, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs
            )
            self.into_latent, self.out_of_latent = linear(width, latent), linear(latent, width)
        if config.shared is not None:
            self.shared = config.shared.build(width, dtype, rngs)
        if config.shared_gate:
            self.shared_gate = Linear(width, 1, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.config = config

    def __call__(self, x: Array, block: Block | None = None) -> Array:
        """`[B, T, E]` to `[B, T, E]`; `block` is the pass, see `specjax.models.layer.FeedConfig`."""
        flat = x.reshape(-1, x.shape[-1])
        c = self.config
        latent = c.latent_size is not None
        read = self.into_latent(flat) if latent else flat
        (weights, left), (experts, others) = (
            (both[:, : c.main], both[:, c.main :]) for both in self.router(flat, block)
        )
        if c.vectors and c.auxiliary:
            read = changed(read, self.ces[...], left, others, c.moe_intermediate_size)
        out = self.experts(read, weights, experts)
        out = (self.out_of_latent(out) if latent else out).reshape(x.shape)
        if c.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared * nnx.sigmoid(self.shared_gate(x)) if c.shared_gate else shared)

    def split_products(self) -> tuple[Any, ...]:
        """None: sums over experts are float32."""
        return ()
