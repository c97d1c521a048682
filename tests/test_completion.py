"""The script of `specjax completion`, in a shell."""

import importlib.util
import shutil
import subprocess

import pytest

from specjax import cli, flags
from specjax.assembly.registry import DRAFTERS

NEEDS = pytest.mark.skipif(
    importlib.util.find_spec("shtab") is None, reason="shtab is not installed: pip install shtab"
)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A script by its shell."""
    folder, found = tmp_path_factory.mktemp("scripts"), {}
    for shell in ("bash", "zsh"):
        found[shell] = folder / shell
        found[shell].write_text(cli.script({name: cli.parser_of(name, True) for name in cli.COMMANDS}, shell))
    return found


@pytest.fixture
def offered(scripts):
    """What bash offers for the last of some words."""

    def go(*words):
        asked = " ".join(f"'{word}'" for word in ("specjax", *words))
        text = f"""
            source {scripts["bash"]}
            COMP_WORDS=({asked}); COMP_CWORD={len(words)}
            "$(complete -p specjax | grep -o -- '-F [^ ]*' | cut -c4-)" specjax '{words[-1]}' '{["specjax", *words][-2]}'
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", text], cwd=scripts["bash"].parent, capture_output=True, text=True)
        assert done.stderr == ""
        return set(done.stdout.split())

    return go


@NEEDS
def test_bash_offers_commands_options_names_and_files(offered):
    alone = {name for name in cli.COMMANDS if " " not in name}
    assert offered("") >= alone
    assert offered("ver") == {"verifiers"}
    for name in ("generate", "plan", "plan train"):
        known = {word for word in flags.of_commands()[name] if word.startswith("--")}
        assert offered(*name.split(), "--") == known
    assert offered("generate", "--drafter", "eagle") == {"eagle1", "eagle2", "eagle3"} & set(DRAFTERS)
    assert offered("eval", "--decode", "stochastic") == {"stochastic_beam"}
    assert offered("train", "eag") == {"eagle1", "eagle3"}
    assert offered("generate", "--help", "") == {"all"}
    assert offered("score", "--input", "ba") == {"bash"}


@NEEDS
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_script(scripts):
    assert subprocess.run(["zsh", "-n", scripts["zsh"]], capture_output=True, text=True).stderr == ""


@NEEDS
def test_the_command_prints_the_script(scripts, capsys):
    for shell in ("bash", "zsh"):
        assert cli.main(["completion", shell]) == 0
        assert capsys.readouterr().out == scripts[shell].read_text()
    assert scripts["zsh"].read_text().startswith("#compdef specjax")


def test_without_the_package_the_command_says_which_to_install(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "shtab" else find(name, *more))
    assert cli.main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "specjax: error: completion needs shtab: pip install 'specjax[completion]'\n"
