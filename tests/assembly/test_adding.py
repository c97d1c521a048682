"""A method is one file and one export line: the drafter of CONTRIBUTING.md as the page has it, and one of each other kind."""

import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.conformance import TARGET, Rows, same, start, texts

import specjax
from specjax import about, cli, diffusion, draft, expand, models, search, verify
from specjax.about import About
from specjax.assembly import registry
from specjax.assembly.models_beside import DEFAULT_MODEL, beside
from specjax.decode import lines
from specjax.diffusion import Credit, Unmask, cache, unmask
from specjax.diffusion.unmask import Choice
from specjax.draft import Drafter, NoDrafter, Verdict
from specjax.draft.heads import folder as folder_of_heads
from specjax.expand import Chain, Expander
from specjax.lm import Wants
from specjax.models import LlamaLM, hub, llama_config
from specjax.verify import Rejection, Verifier

ROOT = Path(__file__).parents[2]
SMALL = LlamaLM(llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=64, tie_word_embeddings=True))
ROWS = Rows(((1, 2, 3), (9, 8)), ("a", "b"), ({}, {}), new_tokens=8)
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


@functools.cache
def params_of_small():
    """A model that tends to say the same again, since it reads and writes with one matrix."""
    return {"target": jax.jit(SMALL.init)(jax.random.key(0)), "draft": None}


def block(begins: str) -> str:
    """The page's block of code whose first line begins so."""
    (found,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if text.startswith(begins))
    return found


def ruff(command: str, file: str, code: str) -> None:
    """As if the code stood in that file of the repository."""
    words = [sys.executable, "-m", "ruff", *command.split(), "--stdin-filename", file, "-"]
    done = subprocess.run(words, input=code, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The page's file, exported by the page's line."""
    file = tmp_path / "repeat.py"
    file.write_text(block("# specjax/draft/repeat.py\n"))
    found = importlib.util.spec_from_file_location("specjax.draft.repeat", file)
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, found.name, module)
    found.loader.exec_module(module)
    monkeypatch.setattr(draft, "Repeat", None, raising=False)  # so that it is gone again afterwards
    exec(block("# specjax/draft/__init__.py, at"), vars(draft))
    monkeypatch.setattr(registry, "DRAFTERS", registry.listed(Drafter, draft))
    return module


def test_the_page_is_formatted():
    for command in ("check", "format --check"):
        ruff(command, "specjax/draft/repeat.py", block("# specjax/draft/repeat.py\n"))
    line = block("# specjax/draft/__init__.py, at").splitlines()[1] + "\n"
    exports = (ROOT / "specjax/draft/__init__.py").read_text().replace(line, "")
    ruff("check", "specjax/draft/__init__.py", exports + line)


@pytest.mark.slow
def test_the_drafter_of_the_page(module):
    """It is found by its line of text, writes plain decoding's text, and is what the page's line in the table makes."""
    drafter, params = registry.build_drafter("repeat:length=2", None)
    assert drafter == module.Repeat(2) and params is None
    found = {}
    for name, each in (("plain", NoDrafter()), ("repeat", drafter)):
        decoder = specjax.speculative(SMALL, each)
        state = start(decoder, ROWS, model=params_of_small(), capacity=32, width=4)
        found[name] = specjax.run(decoder, params_of_small(), state)
    same(texts(found["repeat"]), texts(found["plain"]))
    assert found["repeat"].stats.steps.sum() < found["plain"].stats.steps.sum()  # tokens that repeat come together
    (line,) = re.findall(r'^"repeat": .*$', block("# tests/support/conformance.py, in DRAFTERS\n"), flags=re.MULTILINE)
    table = eval(f"{{{line}}}", {"specjax": specjax})
    assert table == {"repeat": registry.DRAFTERS["repeat"].make()}
    specjax.speculative(TARGET, table["repeat"], Rejection())  # a chain, which the classical rule takes


PUBLISHED = """
    @classmethod
    def layout(cls):
        from specjax.draft.ahead.published import LAYOUT

        return LAYOUT
"""
LAYOUT = '''"""Files of others with such a head."""

from specjax.draft.heads.layout import Layout, Sure


def read(reader, config, target):
    return {}, {"head": reader.linear("ahead", target.lm.config.hidden_size, target.lm.vocab_size)}


LAYOUT = Layout(
    read,
    said=lambda config: Sure.OWN if "ahead" in config else Sure.NO,
    what="it looks ahead",
    stems=("ahead_head",),
    formats={"ahead": lambda folder, form, drafter, params, target, dtype: (f"{form} is read here alone",)},
)
'''
USES_THE_HEAD = """
import json, jax, specjax
from specjax import cli, models
from pathlib import Path
from safetensors.numpy import load_file, save_file
from specjax.assembly.heads import head_line, named_head, write
from specjax.models import LlamaLM, llama_config

lm = LlamaLM(llama_config(32, 32, 48, 2, 4, 2, 8, max_position_embeddings=64))
models.save("target", lm, jax.tree.map(lambda x: 3 * x, jax.jit(lm.init)(jax.random.key(1))))
texts = [{"prompt": [1, 2], "tokens": [(3 * i + j) % 31 + 1 for j in range(9)]} for i in range(8)]
open("data.jsonl", "w").write("".join(json.dumps(text) + chr(10) for text in texts))
words = "--target target --data data.jsonl --batch-size 4 --length 12 --draft-vocabulary 30"
assert cli.main(["train", "ahead", *words.split(), "--steps", "2", "--output", "head"]) == 0
assert len(open("head/training/metrics.jsonl").readlines()) == 2
line = head_line("head")
assert line == "ahead:model=head", line
prompts = [[1, 2, 3], [9, 8]]
plain, drafted = (specjax.generate("target", prompts, drafter=one, max_new_tokens=12) for one in ("none", line))
assert [a.tokens for a in plain] == [b.tokens for b in drafted], (plain, drafted)
assert all(len(record.tokens) == 12 for record in drafted)

kernel = load_file("target/model.safetensors")["lm_head.weight"]
Path("others").mkdir()
save_file({"ahead.weight": kernel}, "others/ahead_head.safetensors")
Path("others/config.json").write_text(json.dumps({"ahead": 1, "architectures": ["AheadModel"]}))
target = models.load("target")
name, head = named_head(head_line("others"), target)
assert name == head.format == "ahead" and (head.params["head"]["kernel"] == kernel.T).all()
assert write("others", "out", "ahead", target) == ("ahead is read here alone",)
try:
    named_head("eagle3:model=others", target)
except ValueError as error:
    assert "a head of another kind (it looks ahead)" in str(error), error
else:
    raise AssertionError("read as another head")
"""


@pytest.mark.slow
@pytest.mark.covers("train")
def test_the_head_of_the_page(tmp_path):
    """A folder and a line: another process trains it for two steps, and decodes plain decoding's text with what that wrote.
    Files of others, where the folder says how these are known, are read as such a head and as no other one."""
    package = tmp_path / "specjax"
    package.mkdir()
    for own in (ROOT / "specjax").iterdir():
        if own.name not in ("draft", "__pycache__"):
            (package / own.name).symlink_to(own.resolve())
    shutil.copytree(ROOT / "specjax/draft", package / "draft", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "draft/ahead").mkdir()
    for name in ("__init__", "objective"):
        file = f"specjax/draft/ahead/{name}.py"
        for command in ("check", "format --check"):
            ruff(command, file, block(f"# {file}\n"))
        (tmp_path / file).write_text(block(f"# {file}\n") + (PUBLISHED if name == "__init__" else ""))
    (package / "draft/ahead/published.py").write_text(LAYOUT)
    exports = (package / "draft/__init__.py").read_text()
    line = block("# specjax/draft/__init__.py, where the head").splitlines()[1]
    (package / "draft/__init__.py").write_text(
        exports.replace("from specjax.draft.swift", f"{line}\nfrom specjax.draft.swift")
    )
    done = subprocess.run(
        [sys.executable, "-c", USES_THE_HEAD], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(
        r'^"ahead": (.*),$', block("# tests/support/conformance.py, in DRAFTERS: the head"), re.MULTILINE
    )
    assert line == "specjax.draft.Ahead()"


@dataclasses.dataclass(frozen=True)
class Never(Verifier):
    """Keeps nothing."""

    about = About("never", "keeps no draft", "-", "same text")

    wants = Wants(draw=True)
    patience: int = 3

    def __call__(self, output, tree, sampler):
        zero = jnp.zeros(tree.tokens.shape[:1], jnp.int32)
        return Verdict(zero[:, None], zero, output.draw[:, 0])


class Short(Chain):
    """A chain under two names."""

    about = (About("short", "a chain", "-"), About("shorter", "a chain", "-", defaults={"length": 1}))


@dataclasses.dataclass(frozen=True)
class Everything(Unmask):
    """Commits all that is open."""

    about = About("everything", "all at once", "-", "lossy")

    scale: float = 1.0

    def __call__(self, guess, memory):
        return Choice(guess.masked, self.scale * guess.noise, guess.tokens), memory


@dataclasses.dataclass(frozen=True)
class Behind(cache.Cache):
    """Computes what lies behind the block's start."""

    about = About("behind", "reuses what lies before the block", "-", "lossy")

    def active(self, canvas):
        return canvas.at >= canvas.start[:, None]


@pytest.mark.parametrize(
    ("added", "package", "table", "packages", "base", "make", "wanted"),
    (
        (Never, verify, "VERIFIERS", (verify,), Verifier, lambda: registry.make_verifier("never:patience=4"), Never(4)),
        (
            Everything,
            unmask,
            "UNMASKS",
            (diffusion, unmask),
            Unmask,
            lambda: registry.make_unmask("credit:alpha=0.5+everything:scale=2"),
            Credit(Everything(2.0), 0.5),
        ),
        (Behind, cache, "CACHES", (cache,), cache.Cache, lambda: registry.make_cache("behind"), Behind()),
        (
            Short,
            expand,
            "EXPANDERS",
            (expand,),
            Expander,
            lambda: registry.parse("drafter", registry.DRAFTERS, "draft:expander=shorter").fields["expander"],
            Short(1),
        ),
    ),
)
def test_one_of_each_other_kind(monkeypatch, added, package, table, packages, base, make, wanted):
    with pytest.raises(ValueError, match="unknown .*; choose "):
        make()
    before = getattr(registry, table)
    monkeypatch.setattr(package, added.__name__, added, raising=False)
    monkeypatch.setattr(registry, table, registry.listed(base, *packages))
    after = getattr(registry, table)
    assert list(after) == [*before, *(words.name for words in about.abouts(added))]
    assert make() == wanted


WARPER = '''"""Favours one token."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.base import Warper, parameter


@dataclasses.dataclass(frozen=True)
class Favour(Warper):
    about = About("favour", "adds to the score of token 3", "-", "same text")

    favour: float = parameter(0.0, "added to token 3; 0 is off", "a number", lambda x: x == x)

    def warp(self, scores, own, text):
        return scores.at[:, :, 3].add(own["favour"][:, None])
'''
USES_IT = """
import jax.numpy as jnp, numpy as np, specjax
from specjax import cli
from specjax.jobs import jsonl
from specjax.jobs.options import JobOptions
from specjax.sampling import SamplingArrays, warp
from specjax.sampling_params import SamplingOptions, form_of

assert specjax.Sampling().favour is None and specjax.Sampling(favour=2.5).given == {"favour": 2.5}
assert jsonl.from_object(1, {"prompt": "a", "favour": 2.5}).options == {"favour": 2.5}
assert JobOptions(sampling=("favour=1.0",)).of_prompts.favour == 1.0
assert "favour" in dict(form_of([SamplingOptions(temperature=1.0, favour=1.0)]))
params = SamplingArrays.make(3, temperature=[1, 0, 1], favour=[2, 2, 0])
got = warp(jnp.zeros((3, 1, 5)), params, jnp.ones(3, bool))
np.testing.assert_array_equal(got[:, 0], [[0, 0, 0, 2, 0], [0] * 5, [0] * 5])
assert cli.main(["samplers"]) == 0
"""


@pytest.mark.slow
def test_a_warper(tmp_path):
    """A file and a line, and the field that `docs/tables.py` writes: the package with them, seen by another process."""
    package = tmp_path / "specjax"
    package.mkdir()
    for own in (ROOT / "specjax").iterdir():
        if own.name not in ("warpers", "sampling_fields.py", "__pycache__"):
            (package / own.name).symlink_to(own.resolve())
    shutil.copytree(ROOT / "specjax/warpers", package / "warpers")
    (package / "warpers/favour.py").write_text(WARPER)
    exports = package / "warpers/__init__.py"
    lines = exports.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "TopKTopP" in line)
    lines.insert(at, "from specjax.warpers.favour import Favour as Favour")
    exports.write_text("\n".join(lines))
    fields = (ROOT / "specjax/sampling_fields.py").read_text()
    (package / "sampling_fields.py").write_text(f"{fields}    favour: float | None = None\n")
    done = subprocess.run(
        [sys.executable, "-c", USES_IT], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert names[names.index("favour") - 1] == "top_h" and "    favour=0.0\n" in done.stdout


class Pair(search.Beam):
    """Two beams."""

    about = About("pair", "two beams", "-", "own text", defaults={"num_beams": 2}, fields=("num_beams",))


def test_a_search(monkeypatch):
    """What `specjax.search` exports is a way to decode, without a line in `specjax.decode`."""
    with monkeypatch.context() as patch:
        patch.setattr(search, "Pair", Pair, raising=False)
        assert importlib.reload(lines).read_decode("pair") == Pair(2)
    assert "pair" not in importlib.reload(lines).DECODES


def test_what_is_not_listed(monkeypatch):
    """A name that another has is refused; an export without names of its own is for Python alone, whatever it inherits."""

    class Quiet(NoDrafter):
        pass

    monkeypatch.setattr(draft, "Quiet", Quiet, raising=False)
    assert registry.listed(Drafter, draft).keys() == registry.DRAFTERS.keys()
    monkeypatch.setattr(Quiet, "about", NoDrafter.about)
    with pytest.raises(ValueError, match="Quiet is called 'none', as another Drafter is"):
        registry.listed(Drafter, draft)
    with pytest.raises(ValueError, match="unknown guarantee 'fast'; choose same text, same distribution"):
        About("quick", "says too much", "-", "fast")


def test_who_promises_what(capsys):
    """Of a drafter's text the verifier decides; every other method of a decoder says what its text is worth."""
    promises = {name: entry.guarantee for name, entry in registry.VERIFIERS.items()}
    assert promises["coupled"] == "same text" and promises["rejection"] == "same distribution"
    for table in (registry.VERIFIERS, registry.UNMASKS, registry.SAMPLERS, registry.CACHES, registry.WARPERS):
        assert all(entry.guarantee in about.GUARANTEES for entry in table.values())
    assert not any(entry.guarantee for entry in (*registry.DRAFTERS.values(), *registry.EXPANDERS.values()))
    assert cli.main(["verifiers"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert all(f"  {promise}  " in listed[name] for name, promise in promises.items())


def test_what_a_line_loads_where_it_names_nothing():
    """What is shipped; one head under two names is one folder, and a filter is never shipped."""
    grown = {"expander": Chain()}
    cases = {"rest": {}, "ppd": {}, "draft": grown, "diffusion_draft": grown, "eagle2": grown}
    loaded = {name: registry.DRAFTERS[name].make(**fields) for name, fields in cases.items()}
    kinds = ["rest", "ppd", "draft", "diffusion", "eagle1"]
    families = {"tiny": "tiny", "tiny-diffusion": "tiny", "smollm2": "smollm2", "another": DEFAULT_MODEL}
    for target, family in families.items():
        assert [beside(stored.asked, target) for stored in loaded.values()] == [f"{family}-{kind}" for kind in kinds]
        assert [beside(registry.make_unmask(name).asked, target) for name in ("guided", "learn2pd")] == [family, ""]
    assert loaded["eagle2"].name == "eagle1" and beside("OWN/TARGET-draft", "tiny") == "OWN/TARGET-draft"


def test_what_is_shipped_beside_a_target_goes_by_its_folder(tmp_path, monkeypatch):
    """A folder of one's own is no shipped model, whatever it is called; and what is not shipped is named, not guessed."""
    ours, own, home = tmp_path / "ours", tmp_path / "own", tmp_path / "home"
    for folder in (*(ours / name for name in (DEFAULT_MODEL, "toy", "toy-draft")), own / "toy", home):
        shutil.copytree(models.shipped()["tiny"], folder)
    (own / "link").symlink_to(ours / "toy")
    monkeypatch.setattr(hub, "_PRETRAINED", ours)
    monkeypatch.setattr(folder_of_heads, "_SHIPPED", ours / "heads")
    monkeypatch.chdir(home)
    line = registry.DRAFTERS["draft"].make(expander=Chain())
    loaded = {asked: models.load(asked) for asked in ("toy", ours / "toy", own / "link", own / "toy")}
    assert [line.found(model) for model in list(loaded.values())[:3]] == ["toy-draft"] * 3
    assert loaded["toy"].name == loaded[own / "toy"].name == "toy"
    with pytest.raises(ValueError, match="no draft model is shipped beside 'toy': name one with model=FOLDER"):
        line.found(loaded[own / "toy"])
    shutil.copytree(own / "toy", ours / f"{DEFAULT_MODEL}-draft")
    assert line.found(loaded[own / "toy"]) == line.found() == f"{DEFAULT_MODEL}-draft"
    wanted = {
        "eagle3": "no head for eagle3 .*`specjax train eagle3`",
        "rest": "no datastore .* with datastore=FOLDER .*`specjax datastore build`",
        "diffusion_draft": "no diffusion model .* with model=FOLDER",
    }
    for name, said in wanted.items():
        with pytest.raises(ValueError, match=said):
            registry.build_drafter(name, loaded["toy"])
    drafter, _ = registry.build_drafter("eagle3", models.abstract("toy"))  # untrained: nothing is looked for
    assert drafter.target.vocab_size == loaded["toy"].lm.vocab_size
