"""`load`: a model from a Hugging Face folder, one with an Orbax checkpoint, or a GGUF file; and its outline without weights."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.models import (
    adapter_merge,
    adapters,
    byte_ranges,
    formats,
    gemma_config,
    gemma_names,
    generation,
    hf_config,
    keeping,
    orbax_folder,
    tokenizer,
    weights,
    xlnet,
)
from specjax.models import masked as masked_config
from specjax.models.attention import AttentionConfig
from specjax.models.default import DEFAULT_MODEL
from specjax.models.diffusion_gemma import DiffusionGemmaLM
from specjax.models.errors import ModelError
from specjax.models.fields import is_size, shown
from specjax.models.gguf import finding
from specjax.models.gguf import model as gguf
from specjax.models.hub import described, find, located, shipped, small_files
from specjax.models.jax_folders import folder as jax_folders
from specjax.models.jax_folders.place import located as other_checkpoint
from specjax.models.json_file import read_json
from specjax.models.kv_heads import copies_for
from specjax.models.layouts import by_rows
from specjax.models.llama import LlamaLM
from specjax.models.loading_bar import bar
from specjax.models.model import (
    LAYER_CAST,
    NO_LIMIT,
    Model,
    cached,
    checked_format,
    reduced,
    remade,
    resolve_dtype,
    typed,
)
from specjax.models.model_config import HeadConfig
from specjax.models.packed import table as packed
from specjax.models.placement import share_of, stored_places, widened, with_copies
from specjax.models.published_configs import CONFIGS
from specjax.models.tensors import read_folder, unread
from specjax.models.xlnet import XlnetLM
from specjax.names import named
from specjax.sharding import make_mesh, rules

_LOG = logging.getLogger(__name__)


@named
def load(
    model: str | os.PathLike[str] | Model | tuple[Any, Any] | None = None,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | str | None = None,
    *,
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = (),
    longest: int | None = None,
    weights: str | formats.Formats | None = None,
    cache_dtype: Any = None,
    reduce_dtype: Any = None,
    revision: str | None = None,
    config: str | os.PathLike[str] | None = None,
    layers: bool = True,
) -> Model:
    """Loads a model.

    It may be a folder from Hugging Face or `save`, a GGUF file, the URL of one of these (`gs://...`, read by fsspec), a Hugging
    Face hub id, or the name of a shipped model or of one in a package (`specjax.models.gguf.finding.PACKAGES`). A folder
    may hold an Orbax checkpoint of MaxText, Tunix or the library `gemma`, with a `config.json` beside it or with `config`.

    Args:
      model: the model; None is the shipped target. A folder or a GGUF file takes precedence over a name, and a name
        over the hub, where `owner/name@revision` is a branch, tag or commit. A folder or hub repository without
        safetensors may hold one GGUF file, or the shards of one; `owner/name/FILE.gguf` names one of several. A
        `Model`, or a pair of an LM (`specjax.lm.BaseLM`) and its parameters, is converted as the other arguments say.
      dtype: the type of the parameters; None is float32 on a CPU and bfloat16 elsewhere. `layercast` stores them in bfloat16
        and computes with them in float32.
      mesh: where to place the parameters, by `specjax.sharding.rules`; only the byte ranges of this host's shards are
        read.
      adapter: the folder or hub id of a PEFT LoRA adapter, which is merged into the parameters, or a list of several, which
        are merged in their order; for models of the Llama family. See `specjax.models.adapters`.
      longest: how many positions the model is used for; None: as many as `config.json` says. A rope with different
        factors for short and long texts (`longrope` of Phi-3) uses those for this length in every text. A rope whose
        base grows with the text (`dynamic`) has the base for this length in every text, and may reach further than
        `config.json` says.
      weights: a format for the layers' matrices: `int8`, `int4`, `fp8` or `dfloat11`, optionally with settings, such as
        `int4:group=32`; or a file that names one for each matrix (`specjax train evopress bits`). See
        `specjax.models.formats`. Each matrix is quantised as it is read or, with an adapter or an
        Orbax checkpoint, once all are loaded. `packed` keeps the codes and scales of matrices that the file packs;
        their numbers are the same. `plain` unpacks them. None: `packed` if the file has such matrices and the backend
        is not a CPU, otherwise `plain`.
      cache_dtype: the type of an autoregressive model's caches: float32, bfloat16 or float16; or int8 or float8_e4m3fn,
        with a scale for each slot and head. None: the type of the parameters.
      reduce_dtype: the type in which parts of attention's and MLPs' products are summed over a mesh's axis `model`.
        bfloat16 halves the data that chips exchange, but texts then differ between meshes. None: float32.
      revision: a branch, tag or commit of a hub id.
      config: a Hugging Face folder, hub id, shipped name or `config.json`, for a folder without one. Its
        `generation_config.json` and its tokenizer are used too.
      layers: whether to keep the parameters of layers. Without them, the model only embeds, norms and unembeds. For a
        folder with safetensors and no adapter, they are not read at all.

    Raises:
      ModelError: (a ValueError) if there is no such model, the folder is incomplete, the architecture is not supported,
        or weights and `config.json` disagree. Also if the adapter is of another kind or for another model, or if caches
        or sums cannot have that type. Also if `weights` does not suit the matrices, because of their groups or because
        `dfloat11` cannot hold their numbers.
    """
    if isinstance(model, (Model, tuple)):
        _check_loaded(adapters.folders(adapter), longest, revision, config)
        return remade(Model(*model) if isinstance(model, tuple) else model, dtype, weights, cache_dtype, reduce_dtype)
    mesh = make_mesh(mesh) if isinstance(mesh, str) else mesh
    resolve_dtype(None if dtype == LAYER_CAST else dtype)  # checks the type before looking for the model
    form, asked = _word(weights)[1], DEFAULT_MODEL if model is None else model
    name, folder = located(asked if revision is None else f"{asked}@{revision}")
    raw, words, config_file = _said(folder, config)
    home = folder if finding.is_gguf(folder) else config_file.parent
    lm, diffusion = architecture(raw, config_file, lambda: getattr(words(), "mask_token_id", None))
    lm, other = _as_stored(lm, raw, folder, name)
    lm, dtype = typed(lm if longest is None else _used_for(lm, longest), dtype)
    if adapters.folders(adapter) and not isinstance(lm, LlamaLM):
        raise ModelError(f"{name} is not a model of the Llama family: an adapter can be merged only into one of these")
    form = checked_format(form, lm)
    if form is not None:
        form.check_mesh(mesh)
    added = _adapters(adapter, lm, raw)
    wide = widened(_with_parted_head(lm, raw, added), mesh)
    # our own checks come before those of transformers
    more: dict[str, Any] = {"generation": generation.fields(home, raw), "starts": generation.starts(home, raw)}
    more |= {"adapter": tuple(one.folder for one in added), "weights": None if form is None else str(form)}
    eos_ids = generation.eos_ids(home, raw, lambda: getattr(words(), "eos_token_id", None))
    more |= _modes(diffusion)
    made = Model(wide, None, words(), eos_ids, name, folder, dtype, **more)
    return _filled(reduced(cached(made, cache_dtype), reduce_dtype), lm, raw, weights, added, mesh, layers, other)


def _modes(diffusion: masked_config.Masked | None) -> dict[str, Any]:
    """The fields of a `Model` that say how it is used for diffusion."""
    return {"dual" if diffusion is not None and diffusion.causal_context else "masked": diffusion}


def _check_loaded(added: Sequence[Any], *others: Any) -> None:
    """Raises ModelError on arguments that only serve to find and read a folder."""
    if added or any(one is not None for one in others):
        raise ModelError(
            "adapter, longest, revision and config have no effect on a loaded model: leave them out, or give its folder"
        )


def _as_stored(lm: Any, raw: dict[str, Any], folder: Path, name: str) -> tuple[Any, jax_folders.Checkpoint | None]:
    """A model with the head or the vocabulary that its folder stores, and the folder's checkpoint if it is another
    library's."""
    other = jax_folders.opened(folder)
    return _with_own_head(lm, raw, folder, name) if other is None else jax_folders.with_vocabulary(lm, other), other


def _filled(
    made: Model, lm: Any, raw: dict[str, Any], weights: Any, added: list[adapters.Adapter], mesh: jax.sharding.Mesh | None,
    layers: bool, other: jax_folders.Checkpoint | None,
) -> Model:  # fmt: skip
    """A model with its parameters.

    Args:
      made: the model; its functions may have copies of kv-heads for the mesh, and a head that adapters part from the
        table of embeddings.
      lm: its functions without those, as the folder has it.
      raw: the folder's config.
      weights: see `load`.
      added: the adapters.
      mesh: see `load`.
      layers: see `load`.
      other: another library's checkpoint in the folder, if it has one.
    """
    folder, dtype, name = made.path, made.dtype, made.name
    assert folder is not None, "it is read from somewhere"
    (word, _), form = _word(weights), formats.read_format(made.weights)
    orbax = other is not None or orbax_folder.is_one(folder)
    shapes, later = lm.abstract(dtype), bool(added) or orbax
    sources = None if orbax else _sources(lm, raw, folder, name, dtype, share_of(mesh))
    if word == keeping.PACKED and later:
        what = "a model with an adapter" if added else "an Orbax checkpoint"
        raise ModelError(f"{what} has no packed matrices: leave weights='packed' out")
    if word == keeping.PACKED or (weights is None and not later and jax.default_backend() != "cpu"):
        sources = _packed(sources, name, asked=word is not None)
        shapes, packs = keeping.shapes(sources, dtype), keeping.any_packed(sources)
        made = dataclasses.replace(made, weights=keeping.PACKED if packs else None)
        if packs and (said := keeping.cost(jax.default_backend(), 1 if mesh is None else mesh.size)):
            _LOG.warning("%s: %s", name, said)
    final = shapes if form is None else form.shapes(shapes)
    places = None if mesh is None else stored_places(widened(lm, mesh), mesh, shapes if later else final)
    if other is not None:
        params = jax_folders.restore(other, name, lm, shapes, places)
    elif sources is None:
        params = orbax_folder.restore(folder, shapes, places)
    else:
        params = _read(sources, name, dtype, places, None if later else form, later or layers)
    for one in added:
        params = _merged(params, one, made.lm, raw, mesh)
    if form is not None and later:
        params = form.params(params)
        params = params if mesh is None else jax.device_put(params, stored_places(made.lm, mesh, params))
    if not layers:
        return dataclasses.replace(made, params=outer(params))
    return dataclasses.replace(made, params=by_rows(params if mesh is None else with_copies(made.lm, params, mesh)))


def _adapters(adapter: Any, lm: Any, raw: dict[str, Any]) -> list[adapters.Adapter]:
    """The adapters that `load` was given, under the names of the text model's tensors."""
    places = [find(one, {}, "adapter", ("adapter_model",))[1] for one in adapters.folders(adapter)]
    return [one.renamed(lambda tensors: _text_of(lm, raw, tensors)) for one in adapters.read_all(places)]


def _ends(lm: LlamaLM, raw: dict[str, Any]) -> tuple[str, str]:
    """The names of the output head's tensor and of the table of embeddings."""
    names = _naming(lm, raw)[0]
    return names("lm_head.weight"), names("model.embed_tokens.weight")


def _with_parted_head(lm: Any, raw: dict[str, Any], added: list[adapters.Adapter]) -> Any:
    """The model, untied if an adapter changes its head and not its table of embeddings alike."""
    if not any(lm.config.head.tied and one.unties(*_ends(lm, raw)) for one in added):
        return lm
    return dataclasses.replace(lm, config=lm.config.every(HeadConfig, tied=False))


def _merged(
    params: Any, one: adapters.Adapter, lm: LlamaLM, raw: dict[str, Any], mesh: jax.sharding.Mesh | None
) -> Any:
    """Parameters with one more adapter. The first that parts the head from the table of embeddings finds a copy of it."""
    head, table = _ends(lm, raw)
    if "head" not in params and one.unties(head, table):
        params = {**params, "head": {"kernel": params["embed"]["embedding"].T}}
        place = None if mesh is None else stored_places(lm, mesh, params)["head"]
        params["head"] = params["head"] if place is None else jax.device_put(params["head"], place)
    own = one if "head" in params else one.without(head)
    return adapter_merge.merged(params, own, *_naming(lm, raw))


def _word(weights: Any) -> tuple[str | None, formats.Formats | None]:
    """Splits `weights` into a word (`packed`, `plain` or None) and a format."""
    if weights in (keeping.PACKED, keeping.PLAIN):
        return weights, None
    return None, formats.read_format(weights)


def _packed(sources: Any, title: str, asked: bool = True) -> Any:
    """Where parameters are stored, packed ones by their parts; an error if packed ones were asked for and there are
    none."""
    kept = keeping.kept(sources)
    if asked and not keeping.any_packed(kept):
        raise ModelError(f"{title} has no packed matrices that can be kept: leave weights='packed' out")
    return kept


def fields_of(asked: str | os.PathLike[str]) -> tuple[str, dict[str, Any], Callable[[], Any], Path]:
    """For a model whose weights are not needed: its name, the fields of its `config.json`, a function that makes its
    tokenizer, and their origin; see `load`."""
    name, folder = located(asked)
    return name, *_said(folder)


def _said(folder: Path, config: Any = None) -> tuple[dict[str, Any], Callable[[], Any], Path]:
    """The fields of a `config.json`, a function that makes the tokenizer, and their origin, for a folder or a GGUF
    file. `config` is that of `load`."""
    if finding.is_gguf(folder):
        if config is not None:
            raise ModelError(f"{folder} has its configuration in it: leave config out")
        return *gguf.described(folder), folder
    config_file = small_files(folder) / "config.json" if config is None else described(config)
    if not config_file.is_file():
        orbax_folder.check_whole(folder)
        if other_checkpoint(folder) is not None:
            raise ModelError(
                f"{folder} has an Orbax checkpoint and no config.json: give config=, the model's Hugging Face folder or hub id "
                "(specjax convert --config), or put config.json and the tokenizer's files into the folder"
            )
        raise ModelError(f"{folder} has no config.json; give a Hugging Face model folder{unread(folder)}")
    return read_json(config_file), functools.cache(lambda: tokenizer.load(config_file.parent)), config_file


def _read(sources: Any, title: str, dtype: Any, places: Any, form: formats.Formats | None, layers: bool) -> Any:
    """Reads stored parameters into a format, with or without those of layers."""
    sources = sources if form is None else form.sources(sources)
    if not layers:
        sources, places = outer(sources), None if places is None else outer(places)
    with bar(f"loading {title}", len(jax.tree.leaves(sources))) as advance:
        return byte_ranges.read(sources, dtype, places, advance)


def outer(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters without those of layers and of an encoder."""
    return {name: part for name, part in params.items() if name not in ("layers", "encoder")}


def _used_for(lm: Any, longest: int) -> Any:
    """A model for texts of at most so many positions; only with a rope of type `dynamic` may they be more than the file
    says."""
    made_for = getattr(lm.config, "max_position_embeddings", NO_LIMIT)
    ropes = [one.rope for one in lm.config.attentions if one.rope is not None] if isinstance(lm, LlamaLM) else []
    most = NO_LIMIT if any(rope.grows for rope in ropes) else made_for
    if not isinstance(lm, LlamaLM) or not is_size(longest) or longest > most:
        raise ModelError(
            f"longest must be a number of positions of a model of the Llama family, up to {most}, not {longest!r}"
        )
    fixed = lambda one: None if one.rope is None else one.rope.fixed(one.head_dim, made_for, longest)
    config = lm.config.mapped(AttentionConfig, lambda one: dataclasses.replace(one, rope=fixed(one)))
    return dataclasses.replace(lm, config=dataclasses.replace(config, max_position_embeddings=longest))


def naming_of(model: Model) -> tuple[weights.Names, weights.Layout]:
    """The names that a model's folder gives to its parameters; of one without a folder, those of its tensors in Llama's
    layout."""
    return (str, weights.hf_name) if model.path is None else _naming(model.lm, _said(model.path)[0])


def _naming(lm: LlamaLM | DiffusionGemmaLM | XlnetLM, raw: dict[str, Any]) -> tuple[weights.Names, weights.Layout]:
    """The names that a folder gives to the parameters of its model."""
    if isinstance(lm, DiffusionGemmaLM):
        return str, gemma_names.hf_name
    if isinstance(lm, XlnetLM):
        return str, xlnet.hf_name
    kind = masked_config.kind_of(raw)
    if kind is not None:
        return masked_config.NAMES.get(kind, str), weights.hf_name
    family = hf_config.family_of(raw)
    return family.names_of(lm.config), family.layout


def changed_parts(model: Model, adapter: str | os.PathLike[str]) -> Any:
    """The parameters that an adapter would change, changed; the model keeps its own. See `adapter_merge.changed`.

    Args:
      model: with its parameters, read from a folder.
      adapter: the folder or hub id of a PEFT LoRA adapter, or a folder inside the model's.

    Raises:
      ModelError: see `load`; and if the model is not of the Llama family, has no folder or no plain parameters.
    """
    if model.abstract or model.path is None or not isinstance(model.lm, LlamaLM) or finding.is_gguf(model.path):
        raise ModelError(f"{model.name}: an adapter needs a model of the Llama family that was read from a folder")
    formats.check_plain(model.params, "take no adapter")
    inside = model.path / adapter
    (one,) = _adapters(inside if inside.is_dir() else adapter, model.lm, _said(model.path)[0])
    return adapter_merge.changed(model.params, one, *naming_of(model))


def _text_of(lm: LlamaLM, raw: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """The text model's tensors, under the names of a text-only model."""
    return hf_config.family_of(raw).text(tensors, lm.config) if masked_config.kind_of(raw) is None else tensors


def _sources(
    lm: LlamaLM | DiffusionGemmaLM | XlnetLM, raw: dict[str, Any], folder: Path, title: str, dtype: Any, share: Any
) -> Any:
    """Where every parameter is stored in a Hugging Face folder."""
    shapes, layout = lm.abstract(dtype), _naming(lm, raw)[1]
    if isinstance(lm, DiffusionGemmaLM):
        return weights.match(gemma_names.text_tensors(read_folder(folder), share), shapes, False, str, layout)
    if isinstance(lm, XlnetLM):
        return weights.match(xlnet.read_tensors(lm, read_folder(folder)), shapes, False, str, layout)
    tensors, names, scales = _stored(lm, raw, folder)
    if scales:
        _LOG.warning("%s: %d scales of a quantised cache, such as %s, are not used", title, len(scales), scales[0])
    extra = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers"))
    if is_size(extra):  # layers that draft for the others; a drafter reads them
        tensors = {name: x for name, x in tensors.items() if not weights.extra_layer(name, lm.num_layers, extra)}
    return weights.match(tensors, shapes, lm.config.head.tied, names, layout)


def _stored(lm: LlamaLM, raw: dict[str, Any], folder: Path) -> tuple[dict[str, Any], weights.Names, list[str]]:
    """The tensors of a folder's text model, their naming, and the cache scales that are left out."""
    if finding.is_gguf(folder):
        return gguf.read_tensors(folder, raw), _naming(lm, raw)[0], []
    tensors, scales = weights.without_cache_scales(read_folder(folder))
    tensors = _text_of(lm, raw, packed.unpacked(raw, tensors))
    renamed = masked_config.kind_of(raw) == "llada" and "model.embed_tokens.weight" in tensors
    return tensors, str if renamed else _naming(lm, raw)[0], scales  # conversions of LLaDA exist under Llama's names


def _with_own_head(lm: Any, raw: dict[str, Any], folder: Path, title: str) -> Any:
    """The model, untied if its folder holds a head that differs from the table, even if `tie_word_embeddings` is set.
    Transformers does the same. Every host compares both tensors in full, since all hosts must agree."""
    if isinstance(lm, XlnetLM):
        return xlnet.with_own_head(lm, read_folder(folder))
    if not isinstance(lm, LlamaLM) or not lm.config.head.tied or orbax_folder.is_one(folder):
        return lm
    tensors, names, _ = _stored(lm, raw, folder)
    head, table = (tensors.get(names(name)) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if head is None or table is None or byte_ranges.equal(head, table):
        return lm
    _LOG.warning("%s has a head that differs from its table, which is used, though tie_word_embeddings is true", title)
    return dataclasses.replace(lm, config=lm.config.every(HeadConfig, tied=False))


def abstract(
    asked: str | os.PathLike[str],
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    config: str | os.PathLike[str] | None = None,
    weights: str | formats.Formats | None = None,
    cache_dtype: Any = None,
    reduce_dtype: Any = None,
) -> Model:
    """A model without its weights: its parameters are `ShapeDtypeStruct`s with the shardings that `load` would give
    them.

    If only the tokenizer says which token is the mask, `masked.mask_id` is 0.

    Args:
      asked: a folder with a `config.json`, a GGUF file, a name that `load` knows, or a hub name of `published_configs`; with
        `config`, any name.
      dtype: see `load`; None is bfloat16.
      mesh: see `load`. Its devices need not exist.
      config: a `config.json`, or its folder.
      weights: see `load`.
      cache_dtype: see `load`.
      reduce_dtype: see `load`.

    Raises:
      ModelError: if there is no such config, the architecture is not supported, or the model does not support these
        `weights`, caches or sums.
    """
    ours, folder = shipped(), None
    path = Path(asked if config is None else config)
    if found := finding.located(path):
        folder, path, raw = found[1], found[1], gguf.described(found[1])[0]
    elif config is None and not path.exists() and str(asked) in CONFIGS:
        raw, path = CONFIGS[str(asked)], Path("config.json")
    else:
        path = ours[str(asked)] if config is None and not path.exists() and str(asked) in ours else path
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            known = ", ".join((*CONFIGS, *ours))
            raise ModelError(f"no configuration {str(path)!r}: give a config.json or its folder, or a model of {known}")
        raw, folder = read_json(path), path.parent
    lm, diffusion = architecture(raw, path)
    lm, dtype = typed(lm, "bfloat16" if dtype is None else dtype)
    if isinstance(lm, LlamaLM):
        lm = dataclasses.replace(lm, kv_copies=copies_for(lm.config, mesh))
    if weights == keeping.PACKED:
        params = _placed(lm, _packed_shapes(lm, raw, folder, str(asked), dtype), mesh)
    else:
        weights = checked_format(_word(weights)[1], lm)
        params = _shapes(lm, dtype, mesh, weights)
    line = None if weights is None else str(weights)
    model = Model(lm, params, None, (), str(asked), folder, dtype, weights=line, **_modes(diffusion))
    return reduced(cached(model, cache_dtype), reduce_dtype)


def with_layers(model: Model, layers: int, mesh: jax.sharding.Mesh | None = None) -> Model:
    """The first layers of a model that has no weights.

    Args:
      model: what `abstract` returned.
      layers: how many.
      mesh: see `abstract`.

    Raises:
      ModelError: if its layers' formats differ by a file.
    """
    lm: Any = model.lm
    lm = dataclasses.replace(lm, config=lm.config.first(layers))
    if model.weights == keeping.PACKED:  # the file decides which matrices are packed
        own = {**model.params, "layers": {i: model.params["layers"][i] for i in range(layers)}}
        return dataclasses.replace(model, lm=lm, params=own)
    form = formats.read_format(model.weights)
    if isinstance(form, formats.PerMatrix):
        raise ModelError(
            f"{form.file} has formats layer by layer, so a few layers do not stand for all: plan the whole model (--whole), "
            "or one format"
        )
    return dataclasses.replace(model, lm=lm, params=_shapes(lm, model.dtype, mesh, form))


def _packed_shapes(lm: Any, raw: dict[str, Any], folder: Path | None, title: str, dtype: Any) -> Any:
    """The shapes of parameters kept as a folder packs them; without its weights, as its config says."""
    shapes = lm.abstract(dtype)
    if folder is not None and (finding.is_gguf(folder) or any(folder.glob("*.safetensors"))):
        return keeping.shapes(_packed(_sources(lm, raw, folder, title, dtype, (0, 1)), title), dtype)
    outline = packed.outline(raw)
    if outline is None:
        raise ModelError(f"{title}: only its weights say which matrices are packed: give a folder that has them")
    return jax.tree_util.tree_map_with_path(outline, shapes)


def _shapes(lm: Any, dtype: Any, mesh: jax.sharding.Mesh | None, form: formats.Formats | None) -> Any:
    return _placed(lm, lm.abstract(dtype) if form is None else form.shapes(lm.abstract(dtype)), mesh)


def _placed(lm: Any, params: Any, mesh: jax.sharding.Mesh | None) -> Any:
    if mesh is None:
        return params
    return by_rows(rules.placed(params, rules.shardings(mesh, lm.axes(params), params, lm.axis_counts())))


def architecture(
    raw: dict[str, Any], file: Path, own_mask: Callable[[], int | None] = lambda: 0
) -> tuple[LlamaLM | DiffusionGemmaLM | XlnetLM, masked_config.Masked | None]:
    """The model of a parsed `config.json`, and how it is used for diffusion.

    Args:
      raw: the config.
      file: the config's origin.
      own_mask: see `specjax.models.masked.from_hf`. Without weights, the mask token does not matter.

    Raises:
      ModelError: on an unusable config.
    """
    try:
        return _described(raw, file, own_mask)
    except ModelError:
        raise
    except (TypeError, AttributeError, ValueError, KeyError, ArithmeticError) as error:
        raise ModelError(f"{file} has a field of the wrong kind: {error}") from error


def _described(raw, file, own_mask):
    if gemma_config.describes(raw):
        shape, canvas = gemma_config.from_hf(raw, generation.read(file.parent))
        return DiffusionGemmaLM(shape), canvas
    if xlnet.describes(raw):
        return XlnetLM(xlnet.config_of(raw)), xlnet.gaps_of(raw, own_mask)
    masked = masked_config.kind_of(raw) is not None
    config, diffusion = (
        masked_config.from_hf(raw, own_mask) if masked else (hf_config.from_hf(raw), masked_config.dual_of(raw))
    )
    if diffusion is not None:
        unmask, cache = (_usual_policy(file.parent, name) for name in ("unmask", "cache"))
        diffusion = dataclasses.replace(diffusion, unmask=unmask, cache=cache)
    odd = sorted({one.head_dim for one in config.attentions if one.head_dim % 2})
    if odd:
        raise ModelError(f"{file}: head_dim must be even, got {odd[0]}")
    return LlamaLM(config), diffusion


def _usual_policy(folder: Path, name: str) -> str:
    line = generation.read(folder).get(name, "")
    if not isinstance(line, str):
        raise ModelError(f"{folder / generation.FILE}: {name} must be the line of a policy, not {shown(line)}")
    return line
