"""The cache write as one operation, whose implementation is chosen when it is lowered and the platform is known.

As with tree attention, one traced program serves every platform, and no kernel is traced for those that have none.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from specjax.kernels.kv_commit import sharded, xla
from specjax.settings import own, settled
from specjax.sharding.ambient import says_nothing

PLATFORMS = ("cpu", "cuda", "tpu")
commit_p = Primitive("kv_commit")
commit_p.multiple_results = True
commit_p.def_impl(lambda *given, **params: _jitted(*given, **params))
commit_p.def_abstract_eval(
    lambda *given, structure, **_: [x.update(weak_type=False) for x in jax.tree.unflatten(structure, given)[0]]
)


def commit(caches, news, src, dst, positions):
    """See `api.kv_commit`, which comes here for None."""
    given, structure = jax.tree.flatten((caches, news, src, dst))
    return tuple(commit_p.bind(*given, structure=structure, mesh=jax.sharding.get_abstract_mesh(), positions=positions))


def served(platform: str, devices: int, *, structure, mesh, positions):
    """The implementation on a platform, as a function of its operands' arrays; the other arguments are its
    parameters."""

    def run(*given):
        caches, news, src, dst = jax.tree.unflatten(structure, given)
        with jax.sharding.use_abstract_mesh(mesh):
            whole = bool(mesh.manual_axes) and set(mesh.manual_axes) == set(mesh.axis_names)  # inside `shard_map`
            unknown = not whole and (bool(mesh.manual_axes) or (devices > 1 and says_nothing(mesh)))
            write = sharded.commit if platform != "tpu" or unknown else _on_tpu
            return list(write(caches, news, src, dst, positions))

    return run


def _on_tpu(caches, news, src, dst, positions):
    """The kernel writes the arrays that it supports, one shape per call; XLA writes the rest, short runs of scales in
    one pass."""
    from specjax.kernels.kv_commit import tpu  # Pallas takes long to import

    alike: dict[tuple, list[int]] = {}
    for i, cache in enumerate(caches):
        alike.setdefault((cache.shape, cache.dtype), []).append(i)
    written = list(caches)
    for same in alike.values():
        group = [caches[i] for i in same], [news[i] for i in same], src, dst
        short = dst.ndim == 1 and (news[0] if src is None else src).shape[1] <= xla.SHORT
        write = _scales if caches[same[0]].ndim == 3 and short else sharded.commit
        if tpu.refusal(sharded.part(caches[same[0]]), *group) is None:
            write = functools.partial(sharded.by_kernel, tpu.commit)
        for i, leaf in zip(same, write(*group, positions), strict=True):
            written[i] = leaf
    return written


def _scales(caches, news, src, dst, positions):
    dst = dst if positions is not None else jnp.where(dst < 0, dst + caches[0].shape[2], dst)
    path = lambda new: new if src is None else jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(new, src)
    return [
        xla.laid_over(cache, path(new).swapaxes(1, 2).astype(cache.dtype), dst, positions)
        for cache, new in zip(caches, news, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("structure", "mesh", "positions"))
def _jitted(*given, **params):
    return commit_p.bind(*given, **params)


def _lower(ctx, *values, platform, **params):
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    with own():
        return mlir.lower_fun(served(platform, devices, **params), multiple_results=True)(ctx, *values)


@settled
def _batch(values, axes, **params):
    """Under `jax.vmap`: XLA's implementation, which supports any mapped axis."""
    return jax.vmap(served("cpu", 1, **params), in_axes=axes)(*values), [0] * len(
        jax.tree.unflatten(params["structure"], values)[0]
    )


batching.primitive_batchers[commit_p] = _batch
for _platform in PLATFORMS:
    mlir.register_lowering(commit_p, functools.partial(_lower, platform=_platform), platform=_platform)
mlir.register_lowering(commit_p, functools.partial(_lower, platform="other"))
