"""Lines that name folders: what ends a value ends none in quotes, and none that is the path of a folder."""

import pytest

from experiments.costs.verify_cost import VerifyOptions, measure
from specjax.assembly import line
from specjax.assembly.heads import head_line
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft.heads.folder import shipped_heads
from specjax.jobs.manifest import named_folders
from specjax.models import hub

NAMES = ("a+b", "a,b", "a, k=2", "a=b", "a b", "a;b", "it's+one", "+", '"a"+b')


def asked(text):
    return parse("drafter", DRAFTERS, text).asked


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_may_be_called_anything(name, tmp_path, monkeypatch):
    """Relative and whole, in quotes and without them, alone and beside other lines."""
    monkeypatch.chdir(tmp_path)
    for path in (name, f"{tmp_path}/{name}"):
        spelt = f"draft:model={line.spelt(path)},length=3"
        assert asked(spelt) == path, "in quotes, there or not"
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    for path in (name, f"{tmp_path}/{name}"):
        texts = [f"draft:model={line.spelt(path)},length=3"]
        texts += [] if path.startswith('"') else [f"draft:model={path},length=3", f"draft: model = {path}, length=3"]
        for text in texts:
            assert asked(text) == path
            assert line.parts(f"none+{text}+rest") == ["none", text, "rest"]
            assert line.lines([f"none,{text},rest"]) == ["none", text, "rest"]
            assert line.settings(f"drafter={text};model=tiny") == {"drafter": text, "model": "tiny"}
            assert list(named_folders([f"none+{text}"])) == [path]


def test_a_path_is_one_only_where_it_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "draft:model=a+prompt_lookup:length=3"
    assert line.parts(text) == ["draft:model=a", "prompt_lookup:length=3"]
    (tmp_path / "a").mkdir()
    assert line.parts(text) == ["draft:model=a", "prompt_lookup:length=3"]
    (tmp_path / "a+prompt_lookup:length=3").mkdir()
    assert line.parts(text) == [text], "the longest"
    quoted = text.replace("=a", "='a'")
    assert line.parts(quoted) == ["draft:model='a'", "prompt_lookup:length=3"]


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ('draft:model="a+b,length=3', "the quote before 'a\\+b,length=3' has no end"),
        ('draft:model="a"b', "'b' follows the quote's end"),
    ),
)
def test_bad_quotes(text, message):
    with pytest.raises(ValueError, match=message):
        line.read_line(text)


def test_a_text_with_both_quotes_cannot_be_spelt():
    with pytest.raises(ValueError, match="quotes of both kinds"):
        line.spelt("\"a+'b")


def test_the_line_of_a_head_in_such_a_folder(tmp_path):
    folder = tmp_path / "a+b"
    folder.symlink_to(hub.find("tiny-medusa", shipped_heads(), "head", ())[1])
    assert asked(head_line(str(folder))) == str(folder) and head_line(str(folder)).startswith("medusa:")


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("prompt_lookup:lenght=4", "has no field 'lenght'; it has .*length.*, verifier, cache; is length meant"),
        (
            "draft:k=4",
            "it has model, expander, length, verifier, cache; k is a field of expanders: add expander=top_k or ",
        ),
        ("none:frob=1", "drafter 'none' has no field 'frob'; it has verifier, cache$"),
    ),
)
def test_a_wrong_field_of_a_drafter_is_told_what_is_meant(text, message):
    with pytest.raises(ValueError, match=message):
        parse("drafter", DRAFTERS, text)


def test_lines_of_verifiers_keep_their_fields_in_a_list():
    options = VerifyOptions(verifiers="coupled,ears:tolerance=0.1,no_such=1", vocab=8, tree="1")
    with pytest.raises(ValueError, match="'ears' has no field 'no_such'"):
        measure(options)
