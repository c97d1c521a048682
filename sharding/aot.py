"""Absent devices to compile for ahead of time: TPU slices, and machines with NVIDIA's Hopper GPUs.

`jax.jit(f).lower(...)` of `ShapeDtypeStruct`s with shardings on such devices uses the platform's real compiler. The
result can be inspected, for example for its memory, but not run.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip, with the figures that its maker publishes.

    Attributes:
      name: its name in topologies.
      hbm_bytes: its memory.
      hbm_bandwidth: bytes per second.
      flops: dense bfloat16 operations per second.
      ici_bandwidth: bytes per second between a chip and its neighbours, over all links and both directions.
      dimensions: the dimensions of a slice; 1 if every chip reaches every other through a switch.
      torus: a slice whose sides are all multiples of this is a ring in every dimension.
      slices: common slices, smallest first.
      source: the source of the figures.
      compilers: packages of which any can compile for it; if there are none, nothing is compiled and only memory is
        counted.
      dtype: the usual type of weights.
      clock: the cycles per second that its compiler counts: the published operations over those of the matrix units per
        cycle; 0: it counts none.
      reads: bytes per second at which its compiler expects a product of few rows to read a large matrix.
      latency: seconds of a message to a neighbour, about 1 us on TPUs (jax-ml.github.io/scaling-book), or through the
        switch, an assumption.
      launch: seconds that a kernel takes to start, if the compiler counts no cycles; an assumption.
      l2_bytes: the size of a cache between the chip and its memory; 0 if the compiler itself decides what stays on the
        chip.
      kinds: JAX's names of such a device.
    """

    name: str
    hbm_bytes: int
    hbm_bandwidth: float
    flops: float
    ici_bandwidth: float
    dimensions: int
    torus: int
    slices: tuple[str, ...]
    source: str
    compilers: tuple[str, ...] = ("libtpu",)
    dtype: str = "bfloat16"
    clock: float = 0.0
    reads: float = 0.0
    latency: float = 1e-6
    launch: float = 0.0
    l2_bytes: int = 0
    kinds: tuple[str, ...] = ()

    def links(self, topology: str) -> float:
        """Bytes per second between a chip and its neighbours in a slice such as `v5e:2x2`, for the chip with the fewest
        links.

        It has two links in a dimension that is a ring, one in another dimension, and none in a dimension of size 1.

        >>> chip_of("v5e:2x2").links("v5e:2x2") / chip_of("v5e:2x2").ici_bandwidth
        0.5
        """
        sides = [int(side) for side in topology.partition(":")[2].split("x")]
        if len(sides) == 1:
            return self.ici_bandwidth
        return self.ici_bandwidth * (1 + self._closed(sides)) * sum(side > 1 for side in sides) / (2 * len(sides))

    def hops(self, topology: str) -> int:
        """The most links on a message's path through a slice.

        >>> [chip_of("v5e:2x2").hops(shape) for shape in ("v5e:1x1", "v5e:2x4", "v5e:16x16")]
        [0, 4, 16]
        """
        sides = [int(side) for side in topology.partition(":")[2].split("x")]
        if len(sides) == 1:
            return int(sides[0] > 1)
        return sum(side // 2 if self._closed(sides) else side - 1 for side in sides)

    def _closed(self, sides: list[int]) -> bool:
        """Whether every dimension is a ring."""
        return all(side % self.torus == 0 for side in sides)


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_BOX = ("1", "2", "4", "8")
_CUDA = "jax_cuda12_plugin", "jax_cuda13_plugin"
_HOPPER: dict[str, Any] = {"compilers": _CUDA, "latency": 5e-6, "launch": 2e-6}
_PAGE = "docs.cloud.google.com/tpu/docs"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v5e", 16 << 30, 819e9, 197e12, 400e9, 2, 16, _FLAT, f"{_PAGE}/v5e", clock=1.5e9, reads=614e9,
            kinds=("TPU v5 lite", "TPU v5e"),
        ),
        Chip(
            "v5p", 95 << 30, 2765e9, 459e12, 1200e9, 3, 4, _CUBE, f"{_PAGE}/v5p", clock=1.75e9, reads=1790e9,
            kinds=("TPU v5", "TPU v5p"),
        ),
        Chip(
            "v6e", 32 << 30, 1640e9, 918e12, 800e9, 2, 16, _FLAT, f"{_PAGE}/v6e", clock=1.75e9, reads=1430e9,
            kinds=("TPU v6 lite", "TPU v6e"),
        ),
        Chip(
            "h100", 80 * 10**9, 3350e9, 989e12, 900e9, 1, 1, _BOX, "NVIDIA H100 SXM5 data sheet", **_HOPPER,
            l2_bytes=50 << 20, kinds=("NVIDIA H100 80GB HBM3",),
        ),
        Chip(
            "h200", 141 * 10**9, 4800e9, 989e12, 900e9, 1, 1, _BOX, "NVIDIA H200 SXM data sheet", **_HOPPER,
            l2_bytes=60 << 20, kinds=("NVIDIA H200",),
        ),
        Chip(
            "t4", 16 * 10**9, 320e9, 65e12, 0, 1, 1, ("1",), "NVIDIA T4 data sheet", (), "float16", kinds=("Tesla T4",)
        ),
    )
}  # fmt: skip


def _hopper(chip: Chip) -> str:
    """The properties that XLA's GPU compiler needs of an absent device: CUDA's tables for compute capability 9.0, and
    the data sheet."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {chip.hbm_bandwidth:.0f} l2_cache_size: {chip.l2_bytes} clock_rate_ghz: 1.98
  device_memory_size: {chip.hbm_bytes} cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 1 }}
device_description_str: "{chip.kinds[0]}"
"""


def chip_named(kind: str) -> Chip | None:
    """The chip of a device by JAX's name for it (`device_kind`), or None.

    >>> chip_named("TPU v5 lite").name
    'v5e'
    """
    return next((chip for chip in CHIPS.values() if kind in chip.kinds), None)


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as `v5e:2x2`.

    Raises:
      ValueError: if the line names an unknown chip, or no slice of it.
    """
    name, _, shape = topology.partition(":")
    if name not in CHIPS:
        raise ValueError(
            f"unknown topology {topology!r}: give CHIP:SLICE with a chip of {', '.join(CHIPS)}, such as v5e:2x2"
        )
    chip = CHIPS[name]
    odd = chip.dimensions == 1 and shape not in chip.slices
    if odd or not re.fullmatch(r"[1-9]\d*" + r"x[1-9]\d*" * (chip.dimensions - 1), shape):
        raise ValueError(
            f"topology {topology!r}: {shape!r} is not a slice of {name}; slices are {', '.join(chip.slices)}"
        )
    return chip


def can_compile(chip: Chip) -> bool:
    """Whether a package that compiles for the chip is installed."""
    return any(importlib.util.find_spec(name) is not None for name in chip.compilers)


def devices(topology: str) -> list[Any]:
    """The devices of a topology, which need not exist: `v5e:2x2`, `v5p:2x2x4`, `v6e:4x4`, `h100:8`.

    Raises:
      ValueError: on an unknown topology, on one without any compiler, or if its compiler is not installed; says what to
        install.
    """
    return list(_devices(topology, chip_of(topology)))


@functools.cache
def _devices(topology: str, chip: Chip) -> tuple[Any, ...]:
    if not chip.compilers:
        raise ValueError(f"nothing here compiles for a {chip.name}")
    if not can_compile(chip):
        raise ValueError(f"compiling for {chip.name} needs {chip.compilers[0]}: pip install 'specjax[aot]'")
    shape = topology.partition(":")[2]
    slices = ", ".join(chip.slices)
    if chip.compilers == _CUDA:
        options = {"target_config": _hopper(chip), "topology": f"1x1x{shape}"}
        try:
            return tuple(topologies.get_topology_desc(platform="cuda", topology_name=chip.name, **options).devices)
        except NotImplementedError as error:  # JAX found no card, and left the plugin out
            raise ValueError(
                f"compiling for {chip.name} needs JAX to start without looking for a GPU: set JAX_PLATFORMS=cpu"
            ) from error
    alone = {"chips_per_host_bounds": (1, 1, 1)} if set(shape.split("x")) == {"1"} else {}
    try:
        with _libtpu():
            return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology, **alone).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"topology {topology!r}: usual slices are {slices}, and libtpu says {reason}") from error


@contextlib.contextmanager
def made_for(kind: str, platform: str, cores: int | None = None) -> Iterator[None]:
    """A context for lowering programs for an absent device without a mesh: it tells kernels the device.

    Args:
      kind: JAX's name of it, such as `NVIDIA H100 80GB HBM3`.
      platform: `gpu` or `tpu`.
      cores: a TPU's number of cores.
    """
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def lowered(program: Any, *given: Any) -> Any:
    """`program.lower(*given)`, for the devices of its arguments.

    Args:
      program: what `jax.jit` returned.
      *given: pytrees of `ShapeDtypeStruct`s with shardings on such devices.
    """
    device = next(iter(jax.tree.leaves(given)[0].sharding.device_set))
    with made_for(device.device_kind, device.platform, getattr(device, "num_cores", None)):
        return program.lower(*given)


def compiled(lowered: Any, level: str | None = None) -> Any:
    """A lowered program, compiled for such devices.

    It is not written to JAX's persistent cache, which stores programs that take long to compile, because it could not
    be loaded again without its devices.

    Args:
      lowered: the program.
      level: the optimisation level, such as `O1`; None: the default.
    """
    settings: dict[str, Any] = {"jax_persistent_cache_min_compile_time_secs": float("inf")}
    if level is not None:
        settings["jax_optimization_level"] = level
    usual = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        return lowered.compile()
    finally:
        for name, value in usual.items():
            jax.config.update(name, value)


@contextlib.contextmanager
def _libtpu() -> Iterator[None]:
    """Sets environment variables that libtpu reads when it is loaded, so that it looks for no TPU and shares the
    machine.

    By default it locks the machine's TPUs. The lock is not needed here: several processes may compile at the same time.
    """
    wanted = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
