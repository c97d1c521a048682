"""The models as torch modules: Qwen3's layers, names and folders, or LFM2's where layers are short convolutions."""

import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specjax.models import MixerConfig, ModelConfig
from specjax.models.hf_config import to_hf
from specjax.models.masked import Masked
from specjax.models.masked import to_hf as masked_to_hf
from specjax.models.states.short_conv import ShortConvConfig


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


class Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on `[B, T, H, D]`."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    """In plain products: short rows in bfloat16 are slow in the fused kernel of a CPU."""

    def __init__(self, shape: ModelConfig, causal: bool):
        super().__init__()
        own, size, head = shape.near, shape.hidden_size, shape.near.head_dim
        self.head, self.causal = head, causal
        self.groups = own.num_attention_heads // own.num_key_value_heads
        self.q_proj = nn.Linear(size, own.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(size, own.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(size, own.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(own.num_attention_heads * head, size, bias=False)
        self.q_norm, self.k_norm = Norm(head), Norm(head)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.head)
        q = rotated(self.q_norm(self.q_proj(x).view(split)), cos, sin)
        k = rotated(self.k_norm(self.k_proj(x).view(split)), cos, sin)
        k, v = (part.repeat_interleave(self.groups, 2) for part in (k, self.v_proj(x).view(split)))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.mT).float() * self.head**-0.5
        if self.causal:
            ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        mixed = scores.softmax(-1) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Convolution(nn.Module):
    """LFM2's gated short convolution, as a sum of shifted rows."""

    def __init__(self, size: int, width: int):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.conv = nn.Conv1d(size, size, width, groups=size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second, third = self.in_proj(x).chunk(3, -1)
        taps = self.conv.weight[:, 0].T
        inputs = F.pad(first * third, (0, 0, len(taps) - 1, 0))
        mixed = sum(tap * inputs[:, at : at + x.shape[1]] for at, tap in enumerate(taps))
        return self.out_proj(second * mixed)


class Mlp(nn.Module):
    def __init__(self, shape: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.dense.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.dense.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.dense.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: ModelConfig, causal: bool, mixer: MixerConfig | None):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(shape.hidden_size), Norm(shape.hidden_size)
        short = isinstance(mixer, ShortConvConfig)
        self.self_attn = Convolution(shape.hidden_size, mixer.kernel_size) if short else Attention(shape, causal)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Logits `[B, T, V]` of tokens `[B, T]`; where not `causal`, every token sees all others."""

    def __init__(self, shape: ModelConfig, causal: bool = True):
        super().__init__()
        self.shape, self.causal = shape, causal
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, causal, layer.mixer) for layer in shape.layers)
        self.norm = Norm(shape.hidden_size)
        frequencies = shape.rope.theta ** -(torch.arange(0, shape.near.head_dim, 2) / shape.near.head_dim)
        angles = torch.arange(shape.max_position_embeddings)[:, None, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Random weights: what writes to the residual stream is scaled down by the depth."""
        torch.manual_seed(seed)
        depth = (2 * len(self.layers)) ** 0.5
        nn.init.normal_(self.embed_tokens.weight, std=self.shape.hidden_size**-0.5)
        for layer in self.layers:
            for part in layer.modules():
                if isinstance(part, nn.Linear):
                    nn.init.normal_(part.weight, std=part.in_features**-0.5)
            mixer = layer.self_attn
            writer = mixer.out_proj if isinstance(mixer, Convolution) else mixer.o_proj
            writer.weight /= depth
            layer.mlp.down_proj.weight /= depth


_LFM2 = {
    ".input_layernorm.": ".operator_norm.", ".post_attention_layernorm.": ".ffn_norm.", ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.", ".mlp.down_proj.": ".feed_forward.w2.", ".o_proj.": ".out_proj.",
    ".q_norm.": ".q_layernorm.", ".k_norm.": ".k_layernorm.", "model.norm.": "model.embedding_norm.",
}  # fmt: skip
"""LFM2's names of modules, by those here."""


def _names(model: Model) -> dict[str, str]:
    """The names of tensors in a folder, by those here."""
    named = {name: f"model.{name}" for name in model.state_dict()}
    if not model.shape.state_mixers:
        return named
    for i, layer in enumerate(model.layers):
        if isinstance(layer.self_attn, Convolution):
            named = {ours: name.replace(f"layers.{i}.self_attn.", f"layers.{i}.conv.") for ours, name in named.items()}
    for ours, theirs in _LFM2.items():
        named = {own: name.replace(ours, theirs) for own, name in named.items()}
    return named


def save(model: Model, folder: pathlib.Path, special: dict[str, int], mask_id: int) -> None:
    """Writes a float16 folder in the layout of `transformers`; `special` has `eos_token_id` and the like."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = to_hf(model.shape) if model.causal else masked_to_hf(model.shape, Masked(mask_id, shift=False, block=0))
    config = plain | {"bos_token_id": None, **special, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors, names = model.state_dict(), _names(model)
    tensors = {names[name]: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load(model: Model, folder: pathlib.Path) -> None:
    """The weights of a folder that `save` wrote."""
    tensors = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({ours: tensors[name].float() for ours, name in _names(model).items()})
