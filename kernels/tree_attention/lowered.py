"""Tree attention as one operation, whose implementation is chosen when it is lowered and the platform is known.

So one traced program serves every platform, as with `jax.lax.platform_dependent`. But nothing is traced for platforms
for which it is not compiled (tracing a kernel takes longer than the rest of a layer), and a platform that cannot serve
it raises an error.
"""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from specjax.kernels.gpu import has_triton
from specjax.kernels.tree_attention import blocked, xla
from specjax.kernels.tree_attention.mapped import over_slots, per_device
from specjax.kernels.tree_attention.parts import Operands
from specjax.settings import own, settled

Array = jax.Array

PLATFORMS = ("cpu", "tpu", "cuda")
GONE = "this version of JAX has no Triton under Pallas"
attend_p = Primitive("tree_attention")
attend_p.def_impl(jax.jit(attend_p.bind, static_argnames=("implementation", "structure", "mesh", "options")))
attend_p.def_abstract_eval(
    lambda *given, structure, **_: jax.core.ShapedArray(
        jax.tree.unflatten(structure, given).result_shape, jax.numpy.float32
    )
)


def attend(implementation: str | None, operands: Operands, **options) -> Array:
    """See `api.attend_with`, which comes here for None, `blocked`, `pallas` and `mosaic_gpu`."""
    given, structure = jax.tree.flatten(operands)
    mesh = jax.sharding.get_abstract_mesh()
    return attend_p.bind(
        *given, implementation=implementation, structure=structure, mesh=mesh, options=tuple(options.items())
    )


def interpreted(implementation: str, platform: str, operands: Operands, **options) -> Array:
    """A platform's kernel in Pallas' interpreter, which cannot be a part of the operation because of its effects.

    Raises:
      ValueError: if it does not take such operands.
    """
    kernel, why = _kernel(implementation, platform, operands)
    if kernel is None or why is not None:
        raise ValueError(_refused(implementation, why))
    return per_device(kernel, jax.sharding.get_abstract_mesh(), **options, interpret=True)(operands)


def chosen(implementation: str | None, platform: str, operands: Operands, options: dict, mesh, devices):
    """The function of the operands that serves a platform.

    Args:
      implementation: see `tree_attention`.
      platform: the platform.
      operands: see `api.attend_with`.
      options: see `api.attend_with`.
      mesh: the ambient mesh where the operation was traced, maybe empty.
      devices: how many devices the program runs on.

    Raises:
      ValueError: if a kernel is named and cannot be used.
    """
    if implementation == "blocked" or (implementation is None and platform == "cpu"):
        return over_slots(blocked, mesh, **options)
    kernel, why = _kernel(implementation, platform, operands)
    if kernel is not None and devices > 1 and mesh.empty:
        why = f"the program runs on {devices} devices, and no mesh is set where it is traced (jax.set_mesh)"
    if kernel is not None and why is None:
        return per_device(kernel, mesh, **options)
    if implementation is None:
        return over_slots(xla, mesh, **options)
    raise ValueError(_refused(implementation, why))


def _refused(implementation, why):
    kernel, others = ("Mosaic GPU", "'pallas', ") if implementation == "mosaic_gpu" else ("Pallas", "")
    others = "'mosaic_gpu', " if why == GONE else others
    return f"the {kernel} kernel of tree attention cannot be used: {why}; choose {others}'xla' or None"


def _kernel(implementation, platform, operands):
    """The module of a platform's kernel or None, and the reason why it cannot be used or None. Importing Pallas is
    slow."""
    if implementation == "mosaic_gpu":
        if platform == "cuda":
            from specjax.kernels.tree_attention import mosaic_gpu

            return mosaic_gpu, mosaic_gpu.refusal(operands)
        return None, "it is made for NVIDIA's Hopper GPUs, and the program is compiled for another platform"
    if platform == "tpu":
        from specjax.kernels.tree_attention import tpu

        return tpu, tpu.refusal(operands)
    if platform == "cuda" and has_triton():
        from specjax.kernels.tree_attention import gpu

        return gpu, gpu.refusal(operands)
    if platform == "cuda" and implementation is None:
        from specjax.kernels.tree_attention import mosaic_gpu

        return mosaic_gpu, mosaic_gpu.refusal(operands)
    if platform == "cuda":
        return None, GONE
    return None, "it is made for TPUs and NVIDIA GPUs, and the program is compiled for another platform"


def served(platform: str, devices: int, *, implementation, structure, mesh, options):
    """The implementation on a platform, as a function of the arrays in its operands; the other arguments are its
    parameters."""

    def run(*given):
        operands = jax.tree.unflatten(structure, given)
        return chosen(implementation, platform, operands, dict(options), mesh, devices)(operands)

    return run


def _lower(ctx, *values, platform, **params):
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    with own():
        return mlir.lower_fun(served(platform, devices, **params), multiple_results=False)(ctx, *values)


@settled
def _batch(values, axes, *, implementation, structure, mesh, options):
    """Under `jax.vmap`: the XLA implementation, which supports any mapped axis."""
    if implementation in ("pallas", "mosaic_gpu"):
        raise ValueError(_refused(implementation, "jax.vmap maps over it"))

    def run(*given):
        return over_slots(xla, mesh, **dict(options))(jax.tree.unflatten(structure, given))

    return jax.vmap(run, in_axes=axes)(*values), 0


batching.primitive_batchers[attend_p] = _batch
for _platform in PLATFORMS:
    mlir.register_lowering(attend_p, functools.partial(_lower, platform=_platform), platform=_platform)
mlir.register_lowering(attend_p, functools.partial(_lower, platform="other"))
