"""`specjax convert`: a model's weights in another layout or type, as a folder that every command takes as a model."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder, shipped name or hub id")
    add("output", metavar="OUTPUT", help="the folder to write, new or empty")
    add("--layout", default="orbax", help="orbax: a checkpoint for any mesh; safetensors: a Hugging Face folder")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, else bfloat16)")
    add("--mesh", help="devices by axis that hold it meanwhile, such as data=2,model=4 (default: one device)")


def command(args: argparse.Namespace) -> int:
    """`specjax convert`."""
    from specjax.terminal import bad_input, note

    with bad_input():
        from specjax import models
        from specjax.models.progress import bar
        from specjax.models.saving import check_layout, check_new
        from specjax.sharding import make_mesh

        output = Path(args.output)
        check_layout(args.layout)
        check_new(output)
        model = models.load(args.model, dtype=args.dtype, mesh=make_mesh(args.mesh))
        with bar(f"writing {output}"):
            models.save(
                output, model.lm, model.params, tokenizer=model.tokenizer, eos_ids=model.eos_ids,
                diffusion=model.masked, layout=args.layout,
            )  # fmt: skip
    note(f"{model.name} is in {output} ({args.layout}, {model.dtype.name}); use it with --model {output}")
    return 0
