"""What is seen to before jax comes in: a package with its links, and a CUDA plugin without a GPU."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from support import cuda_plugin

import specjax
from specjax import cli, startup
from specjax.assembly.models_beside import DEFAULT_MODEL
from specjax.models import tokenizer

WANTED = {"__init__.py", "startup.py", "flags.py", "names.py", "sampling_fields.py", "models"}


@pytest.fixture
def spare(monkeypatch):
    """As on a machine with the plugin and without a driver, before jax is imported."""
    monkeypatch.setattr(startup, "_DRIVERS", ())
    monkeypatch.setattr(startup, "_PLUGINS", ("json",))
    monkeypatch.delitem(sys.modules, "jax")


def test_only_the_plugins_remarks_are_left_out(spare, capfd):
    with pytest.raises(ZeroDivisionError), startup.without_remarks():
        os.write(2, cuda_plugin.REMARKS.encode() + b"a real mistake\n")
        raise ZeroDivisionError
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "a real mistake\nlater\n"


def test_with_a_driver_everything_is_shown(spare, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(startup, "_DRIVERS", (str(tmp_path),))
    with startup.without_remarks():
        os.write(2, cuda_plugin.REMARKS.encode())
    assert capfd.readouterr().err == cuda_plugin.REMARKS
    assert startup.no_spare_plugin(logging.makeLogRecord({"msg": "calling jax_plugins.xla_cuda12.initialize()"}))


def test_commands_leave_out_jaxs_traceback_about_the_plugin(spare, caplog):
    log = logging.getLogger("jax._src.xla_bridge")
    before = [*log.filters]

    def command():
        for name in ("xla_cuda12", "another"):
            log.error("Jax plugin configuration error: Exception when calling %s.initialize()", f"jax_plugins.{name}")
        return 0

    try:
        assert cli.run_command(command) == 0
    finally:
        log.filters[:] = before
    assert [record.args for record in caplog.records] == [("jax_plugins.another",)]


def test_a_first_text_takes_four_programs_and_no_transformers(monkeypatch, caplog, capsys):
    """Row keys, an empty state, the steps, and a prompt's way in: for these a user waits."""
    monkeypatch.setattr(tokenizer, "_transformers", lambda folder: pytest.fail("transformers was asked"))
    words = ["generate", "--model", f"{DEFAULT_MODEL}-draft", "--max-new-tokens", "4", "def f("]
    said = []
    for _ in range(2):
        with jax.log_compiles():
            assert cli.main(words) == 0
        said.append(sum(record.getMessage().startswith("Compiling jit(") for record in caplog.records))
        caplog.clear()
    assert said == [4, 0]
    assert capsys.readouterr().out.startswith("def f(")


@pytest.mark.parametrize("kind", ["text", "dangling"])
def test_a_checkout_without_symbolic_links_says_so(tmp_path, kind):
    """At the first import of the package, before jax comes in."""
    package = tmp_path / "specjax"
    shutil.copytree(Path(specjax.__file__).parent, package, symlinks=True, ignore=lambda _, names: {*names} - WANTED)
    (package / "models").unlink()
    if kind == "text":  # as git writes it where it may not make links
        (package / "models").write_text("../models")
    else:
        (package / "models").symlink_to("../nowhere")
    done = subprocess.run(
        [sys.executable, "-c", "import specjax"], cwd=tmp_path, env={}, capture_output=True, text=True
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"ImportError: {package / 'models'} should be a symbolic link"), (
        last
    )
    assert "core.symlinks=true" in last
