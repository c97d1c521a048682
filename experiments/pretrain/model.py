"""The models as torch modules: Qwen3's layers, names and folders."""

import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specjax.models import ModelConfig
from specjax.models.hf_config import to_hf
from specjax.models.masked import Masked
from specjax.models.masked import to_hf as masked_to_hf


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


class Mlp(nn.Module):
    def __init__(self, shape: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.dense.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.dense.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.dense.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: ModelConfig, causal: bool):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(shape.hidden_size), Norm(shape.hidden_size)
        self.self_attn, self.mlp = Attention(shape, causal), Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Logits `[B, T, V]` of tokens `[B, T]`; where not `causal`, every token sees all others."""

    def __init__(self, shape: ModelConfig, causal: bool = True):
        super().__init__()
        self.shape, self.causal = shape, causal
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, causal) for _ in range(shape.num_hidden_layers))
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
            layer.self_attn.o_proj.weight /= depth
            layer.mlp.down_proj.weight /= depth


def save(model: Model, folder: pathlib.Path, special: dict[str, int], mask_id: int) -> None:
    """Writes a float16 folder in the layout of `transformers`; `special` has `eos_token_id` and the like."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = to_hf(model.shape) if model.causal else masked_to_hf(model.shape, Masked(mask_id, shift=False, block=0))
    config = plain | {"bos_token_id": None, **special, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"model.{name}": tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load(model: Model, folder: pathlib.Path) -> None:
    """The weights of a folder that `save` wrote."""
    tensors = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})
