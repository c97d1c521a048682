"""`specjax convert`: writes a model in another layout or type, or a head in a format of other engines.

Every command takes the written model folder as a model."""

import dataclasses
from pathlib import Path

from specjax import models
from specjax.models.loading_bar import bar
from specjax.serve.options import ModelOptions, option, same
from specjax.sharding import make_mesh
from specjax.terminal import bad_input, note


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of `specjax convert`; see the help of each."""

    model: str = option(
        dataclasses.MISSING,
        "folder, shipped name or hub id of a model; with --format, a head or its drafter's line",
        metavar="MODEL",
        positional=True,
    )
    output: str = option(dataclasses.MISSING, "the folder to write, new or empty", metavar="OUTPUT", positional=True)
    layout: str = option(
        "orbax",
        "orbax: a checkpoint for any mesh; safetensors: a Hugging Face folder; dfloat11: such a folder in bfloat16 with coded "
        "exponents",
    )
    format: str | None = option(
        None, "layout of a head: eagle3 (flat, as vLLM and SGLang read it) or speculators (vLLM's own)"
    )
    target: str | None = option(
        None, "with --format: the target's folder, shipped name or hub id (default: the one that the head names)"
    )
    dtype: str | None = same(ModelOptions, "dtype")
    adapter: tuple[str, ...] = same(ModelOptions, "adapter")
    config: str | None = option(
        None,
        "folder, config.json or hub id that describes the model, where its folder has no config.json (of MaxText, Tunix, "
        "the library gemma)",
    )
    mesh: str | None = option(
        None, "devices by axis that hold the model meanwhile, such as data=2,model=4 (default: one device)"
    )


def command(options: ConvertOptions) -> int:
    """`specjax convert`."""
    if options.format is not None:
        return _head(options, options.format)
    from specjax.models.saving import check_layout, check_new  # slow to import: flax and Orbax

    with bad_input():
        if options.target is not None:
            raise ValueError("--target is the target of a head: give --format too")
        output = Path(options.output)
        check_layout(options.layout)
        check_new(output)
        model = models.load(
            options.model, options.dtype, make_mesh(options.mesh), adapter=options.adapter, config=options.config
        )
        with bar(f"writing {output}"):
            models.save(
                output, model.lm, model.params, tokenizer=model.tokenizer, eos_ids=model.eos_ids,
                diffusion=model.masked or model.dual, layout=options.layout, generation=model.generation,
            )  # fmt: skip
    note(f"{model.name} is in {output} ({options.layout}, {model.dtype.name}); use it with --model {output}")
    return 0


def _head(options: ConvertOptions, layout: str) -> int:
    from specjax.assembly import heads
    from specjax.models.saving import check_new

    with bad_input():
        if options.mesh is not None or options.layout != "orbax" or options.adapter or options.config is not None:
            raise ValueError("--mesh, --layout, --adapter and --config are for models, and --format is for a head")
        check_new(Path(options.output))
        heads.check_format(options.model, layout)
        name = options.target or heads.target_of(options.model)
        if name is None:
            raise ValueError(f"{options.model} does not say which target it is for: give --target MODEL")
        target = models.load(name, dtype=options.dtype)
        with bar(f"writing {options.output}"):
            notes = heads.write(options.model, options.output, layout, target, options.dtype)
    for line in notes:
        note(f"{options.output}: {line}")
    note(f"{options.model} is in {options.output} ({layout}), a head for {target.name}")
    return 0
