"""Meshes from a line of text."""

import math

import jax
from jax.sharding import AxisType

AXES = ("data", "model")


def make_mesh(spec: "str | jax.sharding.Mesh | None") -> jax.sharding.Mesh | None:
    """A mesh over all devices from `"data=2,model=4"`; an axis that is not named has size 1.

    Raises:
      ValueError: on a malformed line or an unknown axis, or when the sizes do not multiply to the number of devices.
    """
    if spec is None or isinstance(spec, jax.sharding.Mesh):
        return spec
    sizes = dict.fromkeys(AXES, 1)
    for part in spec.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or not size.isdigit() or int(size) < 1:
            raise ValueError(f"mesh {spec!r}: {part.strip()!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}")
        sizes[name] = int(size)
    devices = len(jax.devices())
    if math.prod(sizes.values()) != devices:
        have = "1 device" if devices == 1 else f"{devices} devices"
        raise ValueError(f"mesh {spec!r} asks for {math.prod(sizes.values())} devices and there are {have}")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
