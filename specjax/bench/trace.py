"""Traces of programs under `jax.profiler`: the operations that ran, by name and time."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specjax.bench.step_parts import Event


def with_names(lowered: Any, program: Any) -> Any:
    """A program whose operations a trace names.

    A GPU runs many operations as one graph of kernels, which a trace does not name. There it is compiled again, without
    graphs; elsewhere it is `program`.
    """
    return lowered.compile({"xla_gpu_enable_command_buffer": ""}) if jax.default_backend() == "gpu" else program


def events_of(run: Callable[[], Any], module: str) -> list[list[Event]]:
    """The operations of a program under the profiler, one list for every line of the trace (a thread or a stream).

    Args:
      run: runs the program.
      module: the program's name.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        lines = [[_event(event, module) for event in line.events] for plane in planes for line in plane.lines]
    return [[event for event in line if event is not None] for line in lines]


def _event(event: Any, module: str) -> Event | None:
    stats = dict(event.stats)
    if "hlo_op" not in stats or not str(stats.get("hlo_module", module)).startswith(module):
        return None
    return Event(str(stats["hlo_op"]), event.start_ns, event.duration_ns)
