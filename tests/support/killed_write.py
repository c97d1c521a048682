"""`python killed_write.py NUMBER WORDS`: `specjax WORDS`, killed (SIGKILL) in the midst of that file of captured features."""

import os
import signal
import sys

from specjax import cli
from specjax.train import features


def ended(content):
    """A half of a file's content, and the end."""
    whole = b"".join(content)
    yield whole[: len(whole) // 2]
    os.kill(os.getpid(), signal.SIGKILL)


def main(number, *words):
    count, replace = 0, features.replace

    def write(file, content):
        nonlocal count
        count += 1
        replace(file, ended(content) if count == int(number) else content)

    features.replace = write
    sys.exit(cli.main(list(words)))


if __name__ == "__main__":
    main(*sys.argv[1:])
