"""Writes folders of `tiny-keys`: what its training begins with, and with `--weights TRAINED` what is shipped.

`python -m experiments.long_context.write FOLDER`
"""

import argparse
import dataclasses
import json
import pathlib

import numpy as np
from safetensors.numpy import load_file, save_file

from experiments.long_context import circuit
from experiments.long_context.text import Writer
from experiments.pretrain import tokenizer as words
from specjax.models import ModelConfig, llama_config
from specjax.models.hf_config import to_hf

LONGEST = 16896
"""Positions: texts of 16,384 tokens, and room for answers."""

WINDOW = 32


def shape(vocab_size: int) -> ModelConfig:
    """SmolLM3's layers: one with positions and a window, one with neither, and both again."""
    c = circuit
    plain = llama_config(
        vocab_size,
        c.WIDTH,
        c.INNER,
        c.LAYERS,
        c.HEADS,
        c.KV_HEADS,
        c.HEAD,
        max_position_embeddings=LONGEST,
        rope_theta=c.THETA,
    )
    still = lambda layer: dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=None))
    windowed = lambda layer: dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=WINDOW))
    return plain.each(lambda i, layer: windowed(layer) if i % 2 == 0 else still(layer))


def write(folder: pathlib.Path, writer: Writer, weights: circuit.Weights) -> None:
    """Writes tokenizer, config and weights."""
    size = writer.tokenizer.get_vocab_size()
    words.save(writer.tokenizer, folder, LONGEST)
    special = {"eos_token_id": writer.end, "pad_token_id": writer.tokenizer.token_to_id(words.PAD)}
    config = to_hf(shape(size)) | {"bos_token_id": None, **special, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    tensors = {name: np.ascontiguousarray(x, np.float16) for name, x in weights.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--weights", type=pathlib.Path, help="a folder that training wrote")
    args, writer = parser.parse_args(), Writer.shipped()
    if args.weights is None:
        weights = circuit.weights(writer)
    else:
        weights = load_file(str(args.weights / "model.safetensors"))
    write(args.folder, writer, weights)


if __name__ == "__main__":
    main()
