"""A stand-in for JAX's CUDA plugin on a machine without a GPU: it says what the real one says there, and is of no use."""

import os

REMARKS = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    "I0000 00:00:1795363642.848392 9776 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be used.\n"
)


def environment(folder):
    """An environment for a Python in which it is installed."""
    native, plugin = folder / "jax_cuda12_plugin", folder / "jax_plugins" / "xla_cuda12"
    for package in (native, plugin):
        package.mkdir(parents=True)
    (native / "__init__.py").touch()
    (native / "_solver.py").write_text(f"import os\nos.write(2, {REMARKS!r}.encode())\nraise ImportError\n")
    (plugin / "__init__.py").write_text(
        "def initialize():\n    raise RuntimeError('Unable to load CUDA. Is it installed?')\n"
    )
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
