"""Compiled programs are kept for later processes, where the user says nothing else; a folder that takes none ends nothing."""

import os
import re
import resource
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.compiled import programs_folder

import specjax
from specjax import cli, programs
from specjax.serve.engine import Engine
from specjax.train import capture
from specjax.train import command as train

NAMES = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has compiled something, as a user's is that sets nothing: without a folder."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    for name in NAMES:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPECJAX_CACHE", raising=False)
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(3)))
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def kept(folder):
    return sorted(file.name.partition("-")[0] for file in folder.glob("specjax/*/*-cache"))


def some_program(x):
    return jnp.sin(x) @ x


def test_a_program_is_kept_and_taken(fresh, tmp_path, caplog):
    assert kept(tmp_path) == []
    programs.keep.__wrapped__()
    place = tmp_path / "specjax" / os.path.basename(programs_folder())
    assert jax.config.jax_compilation_cache_dir == str(place)
    for taken in (0, 1):
        caplog.clear()
        with jax.log_compiles():
            jax.block_until_ready(jax.jit(some_program)(jnp.ones((4, 4))))
        assert sum("cache hit for 'jit_some_program'" in text for text in caplog.messages) == taken
        assert kept(tmp_path).count("jit_some_program") == 1
        jax.clear_caches()


def test_small_programs_are_kept_where_the_user_says_nothing(fresh, monkeypatch):
    shortest = NAMES[1]
    for own, then in ((1.0, 0.1), (0.5, 0.5)):
        jax.config.update(shortest, own)
        jax.config.update("jax_compilation_cache_dir", None)
        programs.keep.__wrapped__()
        assert getattr(jax.config, shortest) == then
    monkeypatch.setenv(shortest.upper(), "1.0")
    jax.config.update(shortest, 1.0)
    jax.config.update("jax_compilation_cache_dir", None)
    programs.keep.__wrapped__()
    assert getattr(jax.config, shortest) == 1.0


@pytest.mark.parametrize("own", ["folder", "empty", "disabled", "off"])
def test_a_users_own_setting_stays(fresh, monkeypatch, tmp_path, own):
    given = {"folder": str(tmp_path / "mine"), "empty": ""}.get(own)
    jax.config.update("jax_compilation_cache_dir", given)
    jax.config.update("jax_enable_compilation_cache", own != "disabled")
    if own == "off":
        monkeypatch.setenv("SPECJAX_CACHE", "off")
    programs.keep.__wrapped__()
    assert jax.config.jax_compilation_cache_dir == given
    assert list(tmp_path.iterdir()) == []


def test_another_folder(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "mine"))
    programs.keep.__wrapped__()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine" / os.path.basename(programs_folder()))


def test_a_folder_that_cannot_be_made_is_one_line(fresh, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "file" / "below"))
    programs.keep.__wrapped__()
    (line,) = caplog.messages
    assert "are not kept" in line and "Not a directory" in line and "SPECJAX_CACHE" in line and "\n" not in line
    assert jax.config.jax_compilation_cache_dir is None


def test_a_full_folder_is_one_line(fresh, tmp_path, caplog):
    """A process that may write no byte to a file, as on a full disk: it says so once, and compiles."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        programs.keep.__wrapped__()
        assert jax.jit(some_program)(jnp.ones((5, 5))).shape == (5, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (line,) = caplog.messages
    assert "are not kept" in line and "File too large" in line


def test_what_nobody_takes_is_deleted(fresh, tmp_path, caplog):
    """Also where another process has just deleted one, which a link to nothing stands for: that is no warning."""
    old, now = time.time() - (programs.UNUSED_DAYS + 1) * 86400, time.time()
    for name, content, used in (("old", b"x", old), ("torn", b"", now), ("new", b"x", now)):
        file = tmp_path / "specjax" / "another" / f"{name}-cache"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        os.utime(file, (used, old))
    (file.parent / "gone-cache").symlink_to(tmp_path / "nothing")
    programs.keep.__wrapped__()
    assert caplog.messages == []
    (file.parent / "gone-cache").unlink()
    assert kept(tmp_path) == ["new"]


@pytest.mark.parametrize("platform", ["linux", "darwin", "nt"])
def test_the_folder_is_the_platforms(fresh, monkeypatch, tmp_path, platform):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(programs, "Path", type("Home", (type(tmp_path),), {"home": classmethod(lambda cls: tmp_path)}))
    monkeypatch.setattr(programs, "sys", SimpleNamespace(platform=platform))
    monkeypatch.setattr(programs, "os", SimpleNamespace(name="nt" if platform == "nt" else "posix", environ={}))
    below = {"linux": ".cache", "darwin": "Library/Caches", "nt": "AppData/Local"}[platform]
    assert programs.caches() == tmp_path / below


class Asked(Exception):
    pass


@pytest.mark.parametrize(
    "start",
    [
        lambda: Engine("tiny"),
        lambda: specjax.generate("tiny", "a"),
        lambda: specjax.score("tiny", "a", "b"),
        lambda: cli.main(["generate", "a"]),
        lambda: train._here(SimpleNamespace()),
        lambda: capture._here(SimpleNamespace(output="x")),
    ],
    ids=["Engine", "generate", "score", "specjax generate", "specjax train", "specjax capture"],
)
def test_whatever_compiles_keeps(monkeypatch, start):
    def asked():
        raise Asked

    monkeypatch.setattr(programs, "keep", asked)
    with pytest.raises(Asked):
        start()


@pytest.mark.slow
@pytest.mark.covers("jobs")
def test_a_second_start_compiles_nothing_and_an_import_keeps_nothing(tmp_path):
    own = {name: value for name, value in os.environ.items() if name not in map(str.upper, NAMES)}
    env = own | {"XDG_CACHE_HOME": str(tmp_path), "JAX_LOG_COMPILES": "1"}
    run = lambda *words: subprocess.run([sys.executable, *words], env=env, check=True, capture_output=True, text=True)
    run("-c", "import specjax, jax; assert jax.config.jax_compilation_cache_dir is None")
    assert list(tmp_path.iterdir()) == []
    words = "-m", "specjax", "generate", "--model", "tiny-draft", "--max-new-tokens", "4", "def f("
    first, second = run(*words), run(*words)
    assert first.stdout == second.stdout
    hits = lambda done: set(re.findall("cache hit for '(jit_run_program|jit_insert_program)'", done.stderr))
    assert (hits(first), hits(second)) == (set(), {"jit_run_program", "jit_insert_program"})
