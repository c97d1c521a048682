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
    if spec is None:
        return spec
    if isinstance(spec, jax.sharding.Mesh):
        if set(spec.axis_names) != set(AXES):
            raise ValueError(f"a mesh needs the axes {', '.join(AXES)} (of size 1 where unused), not {spec.axis_names}")
        return jax.sharding.Mesh(spec.devices, spec.axis_names, axis_types=(AxisType.Auto,) * len(AXES))
    if not isinstance(spec, str):
        raise ValueError(f"a mesh is a jax.sharding.Mesh or a line such as 'data=2,model=4', not {spec!r}")
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
