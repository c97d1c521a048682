"""A job's measures as OpenTelemetry metrics (extra `otel`): `--metrics otel`.

Where they go is the provider's matter, which the program or `opentelemetry-instrument` sets.
"""

from collections.abc import Mapping
from typing import Any

OTEL = "otel"
"""The word in place of a file of measures."""
GAUGES = {
    "records": ("{record}", "records that are written, those of earlier runs too"),
    "failed": ("{record}", "how many of them hold an error"),
    "total": ("{record}", "records of the job"),
    "seconds": ("s", "time since this run began"),
    "tokens_per_second": ("{token}/s", "new tokens per second, lately"),
    "tokens_per_step": ("{token}", "new tokens per target pass of this run"),
    "seconds_left": ("s", "time until the job ends, if it goes on as lately"),
    "ended": ("1", "1 if no more measures will come"),
}
"""Numbers of a measure that replace the ones before, with their units and meanings."""
COUNTERS = {
    "tokens": ("{token}", "new tokens of this run"),
    "steps": ("{pass}", "target passes of this run"),
}
"""Numbers that only grow."""


def _metrics() -> Any:
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise ValueError("--metrics otel needs OpenTelemetry: pip install 'specjax[otel]'") from error
    return metrics


def check() -> None:
    """Raises ValueError if OpenTelemetry is not installed, or if no provider would take the measures."""
    provider = type(_metrics().get_meter_provider())
    if provider.__module__.startswith("opentelemetry.metrics"):  # the interface's own, which drop everything
        raise ValueError(
            "--metrics otel has nowhere to send to: run `opentelemetry-instrument specjax generate ...`, or set a provider"
        )


class Meter:
    """Sends the lines of measures to the provider's meter `specjax`, as `specjax.job.records` and so on.

    Args:
      title: of the job, the attribute `job` of each number.
    """

    def __init__(self, title: str):
        meter = _metrics().get_meter("specjax")
        name = lambda own: f"specjax.job.{own}"
        self._gauges = {own: meter.create_gauge(name(own), *about) for own, about in GAUGES.items()}
        self._counters = {own: meter.create_counter(name(own), *about) for own, about in COUNTERS.items()}
        self._before = dict.fromkeys(COUNTERS, 0)
        self._job = {"job": title}

    def flush(self) -> None:
        """Has the provider send what it holds, since a process of a job on several hosts leaves without its own end."""
        flush = getattr(_metrics().get_meter_provider(), "force_flush", None)
        if flush is not None:
            flush()

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Sends a line of `specjax.jobs.page.Course`; a number that is None is left as it was."""
        for name, gauge in self._gauges.items():
            if line[name] is not None:
                gauge.set(float(line[name]), self._job)
        for name, counter in self._counters.items():
            counter.add(line[name] - self._before[name], self._job)
            self._before[name] = line[name]
