"""`python -m experiments.growth.child WORDS`: runs `specjax WORDS`, and prints what the process took as its last line, in JSON.

A process that is asked from outside has the peak of its parent too, from before it became another program.
"""

import json
import resource
import sys
import time
from pathlib import Path

from specjax import cli

STATUS = Path("/proc/self/status")


def peak() -> int:
    """The most bytes that this process held at once."""
    if STATUS.exists():
        (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")]
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    if status := cli.main(sys.argv[1:]):
        sys.exit(status)
    print(json.dumps({"seconds": time.process_time(), "bytes": peak()}))
