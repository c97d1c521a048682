"""A process that works on parts of the run, one after the other, as `conduct` asks it to.

It reads a line of JSON for every part, `{"part", "index", "count"}`. Of the part's cases without a record, those whose number
is `index` modulo `count` are its own. On stdout it says that it is `ready`, what it is about to do, `{"begun": case}`, what
it has done, `{"compiled": case}` and `{"over": case}`, and `{"ended": part}`. Where its stdin is closed, the process that
started it is gone, and it goes too.
"""

import concurrent.futures
import datetime
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.chip import records

_spent = threading.local()


def main(folder: Path, rehearse: bool, parts: Sequence[Any] = ()) -> None:
    """Works until nobody asks for more; `parts` are those of the run, if not all that there are."""
    asked: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    began = time.perf_counter()
    import jax

    from experiments.chip.base import Setting

    if not parts:
        from experiments.chip.parts import PARTS as parts

    jax.monitoring.register_event_duration_secs_listener(_count)
    device = jax.devices()[0]
    setting = Setting(device.platform, device.device_kind, rehearse)
    known = records.about(records.read(folder))
    if known is None:
        records.append(folder, {"device": _about(device), "started_seconds": round(time.perf_counter() - began, 1)})
    elif known["kind"] != device.device_kind:
        _say({"refused": f"{folder} has the records of a {known['kind']}, and this is a {device.device_kind}"})
        return
    _say({"ready": True})
    while True:
        order = asked.get()
        part = next(part for part in parts if part.name == order["part"])
        done = {record["case"] for record in records.of_part(records.read(folder), part.name)}
        own = [case for i, case in enumerate(part.cases(setting)) if i % order["count"] == order["index"]]
        _work(folder, setting, part, [case for case in own if case not in done])
        _say({"ended": part.name})


def _work(folder: Path, setting: Any, part: Any, cases: Sequence[str]) -> None:
    """Some cases are compiled side by side, and then run one after the other while nothing else is going on."""
    for start in range(0, len(cases), part.ahead):
        some = cases[start : start + part.ahead]
        for case in some:
            _say({"begun": case})
        with concurrent.futures.ThreadPoolExecutor(max(1, min(len(some), os.cpu_count() or 1))) as pool:
            made = {case: pool.submit(_compiled, part, setting, case) for case in some}
            for future in concurrent.futures.as_completed(made.values()):
                _say({"compiled": next(case for case, own in made.items() if own is future)})
        for case in some:
            _say({"begun": case})
            records.append(folder, {"part": part.name, "case": case, **_result(made[case])})
            _say({"over": case})


def _count(event: str, seconds: float, **_: Any) -> None:
    """Adds up what this thread's programs took to compile."""
    if event == "/jax/core/compile/backend_compile_duration":
        _spent.compiling = _so_far() + seconds


def _so_far() -> float:
    return getattr(_spent, "compiling", 0.0)


def _compiled(part: Any, setting: Any, case: str) -> tuple[Any, float]:
    before = _so_far()
    return part.made(setting, case), _so_far() - before


def _result(made: Any) -> dict[str, Any]:
    """What came of a case, or why nothing did."""
    try:
        run, compiling = made.result()
        began, before = time.perf_counter(), _so_far()
        found = run()
        compiling += _so_far() - before
    except Exception as error:  # whatever a chip's compiler or a kernel raises is a result too
        words = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {words[0]}"[:300]}
    return {**found, "compile_seconds": round(compiling, 2), "run_seconds": round(time.perf_counter() - began, 2)}


def _about(device: Any) -> dict[str, Any]:
    import jax
    import jaxlib

    client = device.client
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "devices": jax.device_count(),
        "memory": (device.memory_stats() or {}).get("bytes_limit"),
        "capability": getattr(device, "compute_capability", None),
        "runtime": " ".join(str(client.platform_version).split())[:120],
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _listen(asked: Any) -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    os._exit(1)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "rehearse" in sys.argv[2:])
