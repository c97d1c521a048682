"""Tiny random-weight models of every family, made with transformers and saved once a session."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough for logits that differ
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # small, so that the scaling matters in a short text
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama_biases": (
        "Llama",
        {
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0},
        },
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 8, "head_dim": 24}),
    "qwen2": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True}),
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """A transformers model, and the folder it was saved to in float32."""

    name: str
    torch: Any
    folder: Path

    def logits(self, ids):
        """`[B, T]` to `[B, T, V]`, in numpy."""
        import torch

        with torch.no_grad():
            return self.torch(torch.as_tensor(ids)).logits.float().numpy()


def build(name: str, folder: Path) -> Reference:
    """Norms and biases are random too: transformers starts them at 1 and 0, which hides a loader that drops them."""
    import torch
    import transformers

    kind, options = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if parameter_name.endswith("norm.weight") else 0.0, 0.3)
    model.save_pretrained(folder)
    return Reference(name, model, folder)


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """`references(name)`: the model of that family, built at the first call."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = build(name, tmp_path_factory.mktemp(name) / name)
        return made[name]

    return get


@pytest.fixture(scope="session", params=list(FAMILIES))
def reference(request, references) -> Reference:
    """Every family in turn."""
    return references(request.param)
