"""`specjax convert`: a model's weights in another layout or type, as a folder that every command takes as a model."""

import dataclasses
from pathlib import Path

from specjax import models
from specjax.models.progress import bar
from specjax.serve.options import DecodeOptions, option, same
from specjax.sharding import make_mesh
from specjax.terminal import bad_input, note


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What `specjax convert` was asked for; see the help of each."""

    model: str = option(dataclasses.MISSING, "folder, shipped name or hub id", metavar="MODEL", positional=True)
    output: str = option(dataclasses.MISSING, "the folder to write, new or empty", metavar="OUTPUT", positional=True)
    layout: str = option("orbax", "orbax: a checkpoint for any mesh; safetensors: a Hugging Face folder")
    dtype: str | None = same(DecodeOptions, "dtype")
    mesh: str | None = option(
        None, "devices by axis that hold it meanwhile, such as data=2,model=4 (default: one device)"
    )


def command(options: ConvertOptions) -> int:
    """`specjax convert`."""
    from specjax.models.saving import check_layout, check_new  # flax and orbax take a while

    with bad_input():
        output = Path(options.output)
        check_layout(options.layout)
        check_new(output)
        model = models.load(options.model, dtype=options.dtype, mesh=make_mesh(options.mesh))
        with bar(f"writing {output}"):
            models.save(
                output, model.lm, model.params, tokenizer=model.tokenizer, eos_ids=model.eos_ids,
                diffusion=model.masked, layout=options.layout,
            )  # fmt: skip
    note(f"{model.name} is in {output} ({options.layout}, {model.dtype.name}); use it with --model {output}")
    return 0
