"""Writes the folder of `tiny-keys`: `python -m experiments.long_context.write`. Nothing is trained; see `circuit.py`."""

import argparse
import dataclasses
import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

from experiments.long_context import circuit
from experiments.long_context.text import SHIPPED, Writer
from experiments.pretrain import tokenizer as words
from specjax.models import ModelConfig, llama_config
from specjax.models.hf_config import to_hf

LONGEST = 16896
"""Positions: texts of 16,384 tokens, and room for answers."""


def shape(vocab_size: int) -> ModelConfig:
    """SmolLM3's layers, of which the second has no positions."""
    c = circuit
    plain = llama_config(
        vocab_size,
        c.WIDTH,
        c.INNER,
        2,
        c.HEADS,
        c.KV_HEADS,
        c.HEAD,
        max_position_embeddings=LONGEST,
        rope_theta=c.THETA,
    )
    still = lambda layer: dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=None))
    return plain.each(lambda i, layer: layer if i == 0 else still(layer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, default=SHIPPED / "tiny-keys")
    folder, writer = parser.parse_args().folder, Writer.shipped()
    size = writer.tokenizer.get_vocab_size()
    words.save(writer.tokenizer, folder, LONGEST)
    special = {"eos_token_id": writer.end, "pad_token_id": writer.tokenizer.token_to_id(words.PAD)}
    config = to_hf(shape(size)) | {"bos_token_id": None, **special, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    tensors = {name: np.ascontiguousarray(x, np.float16) for name, x in circuit.weights(writer, size).items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
