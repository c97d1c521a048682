"""A disk on which checkpoints are written slowly, or not at all.

`python slow_disk.py HOW STEP WORDS`: `specjax WORDS`, which in the midst of writing the checkpoint of that step is `killed`, or
finds the disk `full`.
"""

import os
import signal
import sys
import threading

import tensorstore

from specjax import cli


def behind(before, opened=tensorstore.open):
    """`tensorstore.open`, by which every array is written, in the background after `before`, which is told where that is."""

    def open(spec, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            before(str(spec))
        return opened(spec, *args, **kwargs)

    return open


def full(spec):
    raise OSError("No space left on device")


def killed(spec):
    os.kill(os.getpid(), signal.SIGKILL)


def main(how, step, *words):
    seen = []

    def before(spec):
        if f"/{step}." in spec:
            seen.append(spec)
        if len(seen) >= 4:  # some arrays are on the disk, and others are not
            {"full": full, "killed": killed}[how](spec)

    tensorstore.open = behind(before)
    sys.exit(cli.main(list(words)))


if __name__ == "__main__":
    main(*sys.argv[1:])
