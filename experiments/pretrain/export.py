"""Trained parameters to Hugging Face folders."""

import json
import pathlib
from typing import Any

from tokenizers import Tokenizer

from experiments.pretrain.corpus import EOS, PAD, save_tokenizer
from specjax import models


def save(folder: pathlib.Path, lm: models.LlamaLM, params: Any, tokenizer: Tokenizer) -> None:
    """Writes a float16 folder with its tokenizer; files that are there already are replaced one by one.

    The tokenizer's files are written by hand, because what `save_pretrained` of one major version of `transformers`
    writes is not what the other reads.
    """
    eos, pad = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
    save_tokenizer(tokenizer, folder, lm.config.max_position_embeddings)
    models.save(folder, lm, params, dtype="float16", eos_ids=(eos,))
    generation = {"eos_token_id": eos, "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
