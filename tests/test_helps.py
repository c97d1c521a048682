"""`specjax COMMAND --help` fits a screen, `--help all` leaves nothing out, and the examples are commands."""

import dataclasses
import shlex

import pytest

from specjax import cli, flags, terminal
from specjax.helps import HELPS

MOST = 60
"""Lines of a short help, at 80 columns."""


@pytest.fixture
def shown(capsys, monkeypatch):
    """What a command line prints that ends well."""
    monkeypatch.setenv("COLUMNS", "80")

    def go(*words):
        assert cli.main(list(words)) == 0
        return capsys.readouterr().out

    return go


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_is_short_and_help_all_is_whole(name, shown):
    short, whole = shown(*name.split(), "--help"), shown(*name.split(), "-h", "all")
    assert len(short.splitlines()) <= MOST
    known = {word for word in flags.of_commands()[name] if word.startswith("--")} - {"--help"}
    listed = lambda text: {
        line.split()[0] for line in text.partition("\nexamples:")[0].splitlines() if line[:4] == "  --"
    }
    assert listed(whole) == known
    left = known - listed(short)
    assert (f"`specjax {name} --help all` shows {len(left)} more options: " in short.replace("\n", " ")) == bool(left)
    assert all(word in short for word in known), "one that is left out is named"
    assert shown(*name.split(), "--help", "frob") == short


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_has_its_place(name):
    """In one group, and among the usual ones where it must be given."""
    places = [word for _, usual, others in HELPS[name].placed() for word in (*usual, *others)]
    usual = {word for _, own, _ in HELPS[name].placed() for word in own}
    fields = [field for field in dataclasses.fields(cli.COMMANDS[name][1]) if not field.metadata.get("hidden")]
    assert [field.name for field in fields if places.count(field.name) != 1] == []
    must = {field.name for field in fields if field.default is dataclasses.MISSING or field.metadata.get("positional")}
    assert must <= usual
    positional = [field.name for field in fields if field.metadata.get("positional")]
    assert [word for word in places if word in positional] == positional, "arguments keep their order"


def test_groups_name_what_there_is():
    there = {field.name for _, options, _ in cli.COMMANDS.values() for field in dataclasses.fields(options)}
    named = {word for shown in HELPS.values() for _, usual, others in shown.placed() for word in (*usual, *others)}
    assert named - there == set() and HELPS.keys() == cli.COMMANDS.keys()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_examples_are_commands(name, shown):
    """Each is read as a line of a command: most of its own."""
    examples = HELPS[name].examples
    assert shown(*name.split(), "--help").splitlines()[-2:] == [f"  {example}" for example in examples]
    assert examples[0].startswith(f"specjax {name}")
    for example in examples:
        program, *words = shlex.split(example.partition(" > ")[0])
        count = 2 if " ".join(words[:2]) in cli.COMMANDS else 1
        command = " ".join(words[:count])
        args = cli.parser_of(command).parse_intermixed_args(words[count:])
        args.words = words
        options = terminal.from_args(cli.COMMANDS[command][1], args)
        assert program == "specjax"
        getattr(options, "way", None)  # a line that says nothing would raise
