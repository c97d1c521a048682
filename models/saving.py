"""`save`: a model's parameters, tokenizer and configuration as a folder that `load` opens."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from specjax.models import gemma_config, gemma_names, hf_config, keeping, orbax_folder, weights, xlnet
from specjax.models import masked as masked_config
from specjax.models.diffusion_gemma import DiffusionGemmaLM
from specjax.models.errors import ModelError
from specjax.models.formats import check_plain
from specjax.models.generation import FILE
from specjax.models.kv_heads import merged
from specjax.models.llama import LlamaLM
from specjax.models.model import resolve_dtype
from specjax.models.packed import dfloat11_writing
from specjax.models.packed_matrix import Packed
from specjax.models.xlnet import XlnetLM
from specjax.names import named

LAYOUTS = ("safetensors", "orbax", "dfloat11")


@named
def save(
    folder: str | os.PathLike[str],
    lm: LlamaLM | DiffusionGemmaLM | XlnetLM,
    params: Any,
    dtype: Any = None,
    tokenizer: Any = None,
    eos_ids: tuple[int, ...] = (),
    diffusion: masked_config.Masked | None = None,
    layout: str = "safetensors",
    generation: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that `load` opens on any mesh and, if autoregressive and in safetensors, `transformers` too.

    With safetensors, every file is written beside its final place and then renamed; it replaces an older file of the
    same name. With Orbax, the folder must be new. `config.json` is written last, and a folder without it does not load.
    If there are several processes, all of them call this, for a folder that all of them see.

    Args:
      folder: created where needed.
      lm: the model.
      params: its parameters, on any mesh.
      dtype: the type to write; None keeps each parameter's own.
      tokenizer: a transformers tokenizer, or None.
      eos_ids: end-of-sequence ids for both config files.
      diffusion: the settings of masked diffusion; DiffusionGemma has a `Canvas`, XLNet `Gaps`. With `shift`, the layout is
        Fast-dLLM v2's (`block`) or Dream's. Otherwise it is the first of SDAR's (`block`), LLaDA's and A2D's that can
        express the model (q and k norms, biases, rope).
      layout: `safetensors`: one file with Hugging Face's names, written by one process. `orbax`: a checkpoint to which
        every process writes its part. `dfloat11`: a file like `safetensors` with coded exponents, packed as a whole on
        the host, for a model in bfloat16 other than DiffusionGemma.
      generation: further fields of `generation_config.json`, such as a loaded model's `Model.generation`.
      fields: further fields of `config.json`, such as the mask of a draft model.

    Raises:
      ModelError: if no supported architecture expresses the config, on a bad `dtype` or `layout`, or if matrices were
        quantised when they were loaded. Also if `folder` is a file or, for `orbax`, not empty. Also if other processes
        hold a part of what safetensors would store, or if `dfloat11` cannot write the model.
    """
    dtype = None if dtype is None else resolve_dtype(dtype)
    folder = Path(folder)
    check_layout(layout)
    check_plain(params, "are not written", but=(Packed,))
    _check_folder(folder, layout)
    ids = [int(i) for i in eos_ids]
    eos = {"eos_token_id": None if not ids else ids[0] if len(ids) == 1 else ids}
    bos = {"bos_token_id": getattr(tokenizer, "bos_token_id", None)}
    written = jnp.dtype(jax.tree.leaves(params)[0].dtype if dtype is None else dtype)
    if layout == "dfloat11" and (written != jnp.bfloat16 or not isinstance(lm, LlamaLM)):
        raise ModelError(
            "the layout dfloat11 is for models of the Llama family in bfloat16: give dtype bfloat16, or another layout"
        )
    shape, sampler, names, paths = _described(lm, diffusion)
    if bos["bos_token_id"] is not None or "bos_token_id" not in shape:
        shape = shape | bos
    config = {**shape, **eos, "torch_dtype": written.name, **(fields or {})}
    if isinstance(lm, LlamaLM):
        params = merged(params, lm.config, lm.kv_copies)

    def write_rest(scratch: Path) -> None:
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        for name, content in ((FILE, {**(generation or {}), **bos, **eos, **sampler}), ("config.json", config)):
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n")

    if layout == "orbax":
        _save_orbax(folder, keeping.unpacked(params), dtype, write_rest)
        return
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)):
        raise ModelError("several processes hold these parameters, and one writes safetensors: save them as orbax")
    with beside(folder) as scratch:
        if layout == "dfloat11":
            arrays, config["dfloat11_config"] = dfloat11_writing.packed(weights.stored(params, dtype, names, paths))
            weights.write_arrays(scratch / "model.safetensors", arrays)
        else:
            weights.write(scratch / "model.safetensors", params, dtype, names, paths)
        write_rest(scratch)


def _check_folder(folder: Path, layout: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; give a folder to save to")
    if layout == "orbax":
        check_new(folder)


def check_layout(layout: str) -> None:
    """Raises ModelError on an unknown layout."""
    if layout not in LAYOUTS:
        raise ModelError(f"unknown layout {layout!r}; choose {', '.join(LAYOUTS)}")


def check_new(folder: Path) -> None:
    """Raises ModelError if a folder is not empty."""
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; give a folder to save to")
    if folder.is_dir() and any(folder.iterdir()):
        orbax_folder.check_whole(folder)
        raise ModelError(f"{folder} exists and is not empty; choose another folder, or delete it first")


def _described(lm, diffusion):
    """The content of `config.json`, the sampler or policies of `generation_config.json`, and the tensor names for
    safetensors."""
    if isinstance(lm, DiffusionGemmaLM):
        if not isinstance(diffusion, masked_config.Canvas):
            raise ModelError("a DiffusionGemma model is saved with its canvas: diffusion=Canvas(...)")
        return *gemma_config.to_hf(lm.config, diffusion), str, gemma_names.hf_name
    if isinstance(lm, XlnetLM):
        if not isinstance(diffusion, masked_config.Gaps):
            raise ModelError("an any-subset model is saved with its gaps: diffusion=Gaps(mask_id, False)")
        return xlnet.to_hf(lm.config, diffusion), {}, str, xlnet.hf_name
    if isinstance(diffusion, masked_config.Canvas):
        raise ModelError("a Canvas is how DiffusionGemma is used; a model of the Llama family has a Masked")
    if diffusion is None:
        config = hf_config.to_hf(lm.config)
        family = hf_config.family_of(config)
        return config, {}, family.names_of(lm.config), family.layout
    config = masked_config.to_hf(lm.config, diffusion)
    lines = {"unmask": diffusion.unmask, "cache": diffusion.cache}
    usual = {name: line for name, line in lines.items() if line}
    if masked_config.kind_of(config) is None:  # of both kinds, and written as its own family
        family = hf_config.family_of(config)
        return config, usual, family.names_of(lm.config), family.layout
    return config, usual, masked_config.NAMES.get(config["model_type"], str), weights.hf_name


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """An empty folder whose files are moved to `folder` at the end, `config.json` last."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield scratch
        folder.mkdir(exist_ok=True)
        for file in sorted(scratch.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _save_orbax(folder: Path, params: Any, dtype: Any, write_rest: Callable[[Path], None]) -> None:
    first = jax.process_index() == 0
    _wait_for_all(f"{folder} is free")
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    _wait_for_all(f"{folder} is there")
    try:
        orbax_folder.write(folder, params, dtype)
        _wait_for_all(f"{folder} has its checksums")
        if first:
            with beside(folder) as scratch:
                write_rest(scratch)
    except BaseException:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    _wait_for_all(f"{folder} is whole")


def _wait_for_all(what: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
