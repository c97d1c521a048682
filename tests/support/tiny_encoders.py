"""Tiny models with an encoder and a decoder, made with transformers; a line per kind."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

BART = {
    "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36,
    "encoder_attention_heads": 3, "decoder_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 1,
    "decoder_start_token_id": 2, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 3,
    "decoder_start_token_id": 0,
}  # fmt: skip
SOUND = {"num_mel_bins": 10, "max_source_positions": 30, "max_target_positions": 64, "begin_suppress_tokens": None}
IDS = {"bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 3}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "t5_gated": (
        "T5Config", "T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    ),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", T5 | {"relative_attention_num_buckets": 16, "d_kv": 8}),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", BART | {"scale_embedding": True, "activation_function": "relu"}),
    "marian": ("MarianConfig", "MarianMTModel", BART | {"scale_embedding": True, "activation_function": "swish"}),
    "marian_apart": (
        "MarianConfig", "MarianMTModel", BART | {"decoder_vocab_size": 53, "share_encoder_decoder_embeddings": False}
    ),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", BART | SOUND | IDS),
}  # fmt: skip
"""The classes of transformers, and their fields."""
LENGTHS = (21, 9, 1)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A model of transformers, and the folder that it was saved to.

    Attributes:
      torch: the model.
      folder: its folder.
    """

    torch: Any
    folder: Path

    @property
    def hears(self) -> bool:
        """Whether its sources are frames of sound."""
        return type(self.torch).__name__.startswith("Whisper")

    @property
    def pad(self) -> int:
        """The id after a text that has ended."""
        return self.torch.config.pad_token_id

    @property
    def vocab(self) -> int:
        """The number of tokens that its decoder writes."""
        return getattr(self.torch.config, "decoder_vocab_size", None) or self.torch.config.vocab_size

    def sources(self, seed: int = 0) -> list[Any]:
        """Ragged lists of ids, or arrays of frames."""
        rng, config = np.random.default_rng(seed), self.torch.config
        if self.hears:
            size = 2 * config.max_source_positions, config.num_mel_bins
            return [rng.normal(size=size).astype(np.float32) for _ in LENGTHS]
        return [rng.integers(3, config.vocab_size, count).tolist() for count in LENGTHS]

    def asked(self, source: Any) -> dict[str, Any]:
        """The arguments of transformers for one source."""
        import torch

        if self.hears:
            return {"input_features": torch.as_tensor(source.T.copy()[None])}
        ids = torch.as_tensor(np.asarray(source)[None])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def logits(self, source: Any, text: Any) -> np.ndarray:
        """`[T, V]` after each token of a text."""
        import torch

        with torch.no_grad():
            return (
                self.torch(**self.asked(source), decoder_input_ids=torch.as_tensor(np.asarray(text)[None]))
                .logits[0]
                .numpy()
            )

    def greedy(self, source: Any, starts: Any, count: int) -> list[int]:
        """The likeliest tokens, by passes without a cache: transformers makes it as deep as the encoder."""
        text = list(starts)
        for _ in range(count):
            text.append(int(self.logits(source, text)[-1].argmax()))
        return text[len(starts) :]


def build(name: str, folder: Path, seed: int = 0, **drawn: Any) -> Encoding:
    """The model of a kind, with random numbers everywhere, also where transformers starts with ones and zeros."""
    import torch
    import transformers

    config, model, fields = KINDS[name]
    torch.manual_seed(seed)
    made = getattr(transformers, model)(getattr(transformers, config)(**(fields | drawn))).eval()
    with torch.no_grad():
        biases = [(name, x) for name, x in made.named_buffers() if name == "final_logits_bias"]
        for where, x in [*made.named_parameters(), *biases]:
            if name.startswith("marian") and "embed_positions" in where:
                continue  # sinusoids
            # a small table and large layers make texts that do not repeat one token; scores of T5 are not scaled
            table = 0.6 if name.startswith("marian") else 0.15
            own = {
                "logits_bias": 0.05,
                "Attention.q": 0.12,
                "shared": table,
                "embed_tokens": table,
                "embed_positions": 1.5,
            }
            small = next((size for part, size in own.items() if part in where), 0.45)
            x.copy_(torch.randn_like(x) * (0.1 if x.ndim == 1 else small))
            if x.ndim == 1 and where.endswith("weight"):
                x.add_(1.0)
    made.save_pretrained(folder)
    return Encoding(made, folder)


def draw(name: str, seed: int) -> dict[str, Any]:
    """Other sizes of a kind, odd ones among them."""
    rng = np.random.default_rng(seed)
    one = lambda *values: values[rng.integers(len(values))]
    heads = int(one(1, 2, 3, 5))
    if name.endswith("t5") or name == "t5_gated":
        return {
            "num_heads": heads, "d_kv": int(one(2, 6, 10)), "d_model": int(one(10, 24, 30)), "d_ff": int(one(7, 40)),
            "num_layers": int(one(1, 3)), "num_decoder_layers": int(one(1, 2)),
            "relative_attention_num_buckets": int(one(8, 32)), "vocab_size": int(one(37, 64)),
            "relative_attention_max_distance": int(one(20, 128)),
        }  # fmt: skip
    return {
        "d_model": heads * int(one(2, 6)) * 2, "encoder_attention_heads": heads, "decoder_attention_heads": 2 * heads,
        "encoder_layers": int(one(1, 3)), "decoder_layers": int(one(1, 2)), "encoder_ffn_dim": int(one(7, 40)),
        "decoder_ffn_dim": int(one(5, 33)), "scale_embedding": bool(one(0, 1)),
        "activation_function": str(one("relu", "gelu", "swish", "gelu_new")),
    }  # fmt: skip
