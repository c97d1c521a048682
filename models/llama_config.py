"""What a model of `specjax.models.llama` is made of: sizes, and the parts in which families differ."""

import dataclasses
from typing import Literal

from specjax.models.experts import ExpertsConfig
from specjax.models.mlp import Activation
from specjax.models.norms import NormKind


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """What becomes of a rope's frequencies.

    Attributes:
      kind: `linear` divides positions by `factor`; `llama3` rescales low frequencies only (Llama 3.1, section 3.3);
        `proportional` divides positions, and rotates only the fastest pairs of a head (Gemma 4); `yarn` divides low
        frequencies, leaves high ones and blends those between (Peng et al. 2023, arXiv:2309.00071, section 3.2); `longrope`
        divides each frequency by a number of its own (Ding et al. 2024, arXiv:2402.13753). There are two sets of those, and one
        serves all positions of a model: keys in a cache keep theirs, so that a text that outgrew the first training's positions
        would mix both, and depend on how it was cut into passes.
      factor: see `kind`.
      beta_fast: of `yarn`: pairs that turn at least so often within the first training's positions stay as they are.
      beta_slow: those that turn at most so often are divided.
      truncate: whether the first and last pair of those between are whole numbers, rounded outwards.
      magnitude: what cosines and sines are multiplied by, so that scores are by its square.
      short_factor: of `longrope`, for each pair, where `max_position_embeddings` is at most `original_max_position_embeddings`.
      long_factor: where it is above.
      rotated: how many of a head's pairs `proportional` rotates; a pair is a channel of a head's first half and the one of its
        second half.
    """

    kind: Literal["linear", "llama3", "proportional", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rotated: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class FullAttention:
    """What the layers without a window have of their own, where they differ from those with one; None: the same.

    Attributes:
      rope_scaling: None for none: that of the other layers is not theirs.
      value_is_key: see `LlamaConfig`.
    """

    head_dim: int | None = None
    num_key_value_heads: int | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    value_is_key: bool = False


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Names follow the Hugging Face `config.json` of the family, where it has one."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()  # which layers use the window; empty: all of them
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_wide_norm: bool = False  # whether q and k are normalised over all heads at once, before they are split (OLMo)
    logits_scaling: float = 1.0  # what logits are divided by (Granite's name)
    partial_rotary_factor: float = 1.0  # the share of a head that is rotated: its first channels; 0: no positions
    rope_layers: tuple[bool, ...] = ()  # which layers rotate, the others have no positions; empty: all of them
    residual_multiplier: float = 1.0  # what attention and MLP give is multiplied by before it is added
    experts: ExpertsConfig | None = None
    sparse_layers: tuple[bool, ...] = ()  # which layers have experts; empty: all of them, if any
    norm: NormKind = "rounded"
    pre_norms: bool = True  # whether what attention and MLP read is normalised
    post_norms: bool = False  # whether what attention and MLP give is normalised too, before it is added
    hidden_act: Activation = "silu"
    embedding_scale: float = 1.0  # what embeddings are multiplied by, once it is rounded to their type
    attention_scale: float | None = None  # what scores are multiplied by; None: head_dim^-0.5
    attention_sinks: bool = False  # whether a learned score of every head takes part in its softmaxes, without a value
    attn_logit_softcapping: float | None = None  # keeps scores within this distance of zero, by a tanh
    final_logit_softcapping: float | None = None  # the same for logits
    full: FullAttention | None = None
    value_is_key: bool = False  # whether values are what a layer's key projection gives, before its norm and rope
    value_norm: bool = False  # whether values are normalised, without a scale
    layer_scalar: bool = False  # whether a learned number multiplies the residual stream behind every layer
    num_kv_shared_layers: int = 0  # the last so many read the keys and values of another: see `source`
    use_double_wide_mlp: bool = False  # whether the MLPs of those are twice as wide
    hidden_size_per_layer_input: int = 0  # width of what a layer reads of a token besides (`layer_inputs`); 0: nothing
    vocab_size_per_layer_input: int = 0  # tokens that have that

    @property
    def rotary_dim(self) -> int:
        """How many channels of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and (not self.sparse_layers or self.sparse_layers[layer])

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None where it attends to everything."""
        return self.sliding_window if not self.sliding_layers or self.sliding_layers[layer] else None

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or the last one of its kind that has some."""
        owning = self.num_hidden_layers - self.num_kv_shared_layers
        alike = [i for i in range(owning) if self.window(i) == self.window(layer)]
        return layer if layer < owning or not alike else alike[-1]

    def at(self, layer: int) -> "LlamaConfig":
        """The config of a model all of whose layers are as this one, but for experts; equal for layers of a kind."""
        if self.full is None and not self.num_kv_shared_layers and not self.rope_layers:
            return self
        own = {} if self.full is None or self.window(layer) is not None else vars(self.full)
        own = {name: value for name, value in own.items() if value is not None or name == "rope_scaling"}
        if self.rope_layers:
            own |= {"rope_layers": ()} | ({} if self.rope_layers[layer] else {"partial_rotary_factor": 0.0})
        shares = self.source(layer) != layer
        wide = 2 if shares and self.use_double_wide_mlp else 1
        own |= {"num_kv_shared_layers": self.num_hidden_layers if shares else 0, "use_double_wide_mlp": False}
        return dataclasses.replace(self, full=None, intermediate_size=wide * self.intermediate_size, **own)

    @property
    def plain(self) -> "LlamaConfig":
        """The config of layers of the same sizes that are Llama's: without windows, experts and other families' parts."""
        bare = {"sliding_window": None, "sliding_layers": (), "experts": None, "sparse_layers": ()}
        rotated = {"partial_rotary_factor": self.partial_rotary_factor or 1.0}
        return dataclasses.replace(self, **bare, **rotated, **_PARTS)

    @property
    def head_sizes(self) -> frozenset[tuple[int, int]]:
        """Of every kind of layer there is, how many kv-heads it has, and their width."""
        kinds = {self.window(i) is None: self.at(i) for i in range(self.num_hidden_layers)}
        return frozenset((kind.num_key_value_heads, kind.head_dim) for kind in kinds.values())


_NAMES = (
    "norm", "pre_norms", "post_norms", "qk_wide_norm", "hidden_act", "embedding_scale", "attention_scale",
    "attention_sinks", "rope_layers", "residual_multiplier", "attn_logit_softcapping", "final_logit_softcapping", "full",
    "value_is_key", "value_norm", "layer_scalar", "num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
)  # fmt: skip
_PARTS = {field.name: field.default for field in dataclasses.fields(LlamaConfig) if field.name in _NAMES}
"""The fields that Llama never sets, and what they are there."""
