"""Meshes from lines of text."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

AXES = ("data", "model", "context")
"""The axes for rows, for weights and heads, and for cache slots. Every mesh has all three; an unused axis has size
1."""


def make_mesh(spec: "str | jax.sharding.Mesh | None", devices: Sequence[Any] | None = None) -> jax.sharding.Mesh | None:
    """A mesh over all devices from `"data=2,model=2,context=2"`; an axis that is not named has size 1.

    Args:
      spec: the line, a mesh (missing axes are added with size 1), or None for no mesh. A line may begin with a platform,
        such as `"cpu:model=1"` for the host's memory beside an accelerator.
      devices: for example those of `specjax.sharding.aot.devices`; None: all devices of JAX.

    Raises:
      ValueError: on a malformed line or an unknown axis, or if the product of the sizes is not the number of devices.
    """
    if spec is None:
        return spec
    if isinstance(spec, jax.sharding.Mesh):
        unknown = [name for name in spec.axis_names if name not in AXES]
        if unknown:
            raise ValueError(f"a mesh has the axes {', '.join(AXES)}, or some of them; {unknown[0]!r} is none of these")
        names = (*spec.axis_names, *(name for name in AXES if name not in spec.axis_names))
        chips = np.reshape(spec.devices, (*spec.devices.shape, *[1] * (len(names) - spec.devices.ndim)))
        return jax.sharding.Mesh(chips, names, axis_types=(AxisType.Auto,) * len(AXES))
    if not isinstance(spec, str):
        raise ValueError(f"a mesh is a jax.sharding.Mesh or a line such as 'data=2,model=4', not {spec!r}")
    sizes = axis_sizes(spec)
    given = devices_of(spec) if devices is None else list(devices)
    if math.prod(sizes.values()) != len(given):
        have = "1 device" if len(given) == 1 else f"{len(given)} devices"
        raise ValueError(f"mesh {spec!r} asks for {math.prod(sizes.values())} devices and there are {have}")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=given)


def devices_of(spec: str) -> list[Any]:
    """The devices of a line's platform, or of JAX's usual one.

    Raises:
      ValueError: if there is no such platform.
    """
    platform = spec.rpartition(":")[0].strip()
    try:
        return jax.devices(platform or None)
    except RuntimeError as error:
        raise ValueError(f"mesh {spec!r}: JAX has no platform {platform!r} here") from error


def axis_sizes(spec: str) -> dict[str, int]:
    """The sizes of the axes in a line such as `"data=2,model=4"`; an axis that is not named has size 1.

    Raises:
      ValueError: on a malformed line or an unknown axis.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in spec.rpartition(":")[2].split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or not size.isdigit() or int(size) < 1:
            raise ValueError(f"mesh {spec!r}: {part.strip()!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}")
        sizes[name] = int(size)
    return sizes
