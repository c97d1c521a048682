"""The notebooks: they run, pairs agree, first cells and badges follow from the address, and the promised lines are kept."""

import ast
import importlib.util
import json
from pathlib import Path

import nbformat
import pytest
from support.blocks import names_of

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "notebooks").glob("*.md"))
ADDRESS = "https://github.com/someone/specjax"


@pytest.fixture(scope="module")
def pairs():
    spec = importlib.util.spec_from_file_location("pairs", DOCS / "pairs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pairs_agree_and_hold_the_outputs_of_their_code(pairs, page):
    text = page.read_text()
    assert pairs.filled(text, page.stem, pairs.repository()) == text, "run python docs/pairs.py"
    stored = json.loads(page.with_suffix(".ipynb").read_text())
    nbformat.validate(stored)
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in stored["cells"]]
    assert cells == [(cell.cell_type, cell.source) for cell in pairs.paired(text).cells], "run python docs/pairs.py"
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert len(code) > 2 and counts == list(range(1, len(code) + 1)), "run python docs/pairs.py --execute"
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds and kinds <= {"stream", "display_data", "execute_result"}
    assert text.count("```{code-cell}") == len(code)
    for cell in code:
        ast.parse("".join(cell["source"]))


def runnable(page):
    return pytest.param(page, id=page.stem, marks=pytest.mark.covers(page.stem, *sorted(names_of(page.read_text()))))


@pytest.mark.slow
@pytest.mark.parametrize("page", [runnable(page) for page in PAGES])
def test_it_runs(page, tmp_path, monkeypatch):
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason="needs the extra docs")
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    notebook = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


def test_every_notebook_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    assert len(PAGES) == 9 and all(f"\nnotebooks/{page.stem}\n" in index for page in PAGES)
    assert {page.stem for page in (DOCS / "notebooks").glob("*.ipynb")} == {page.stem for page in PAGES}


def test_badge_and_installation_follow_from_the_address(pairs):
    page = PAGES[0]
    bare, public = (pairs.filled(page.read_text(), page.stem, address) for address in ("", ADDRESS))
    assert "colab" not in bare.lower().replace("colab_release_tag", "") and "git+" not in bare and "a clone" in bare
    where = f"(https://colab.research.google.com/github/someone/specjax/blob/main/docs/notebooks/{page.stem}.ipynb)"
    kaggle = f"(https://kaggle.com/kernels/welcome?src={ADDRESS}/blob/main/docs/notebooks/{page.stem}.ipynb)"
    assert public.count(kaggle) == 1 and "kaggle.com" not in bare
    assert public.count(where) == 1 and f"git+{ADDRESS}" in public and "a clone" not in public
    assert pairs.filled(public, page.stem, ADDRESS) == public and pairs.filled(public, page.stem, "") == bare


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_says_what_it_does_on_other_devices(pairs, page):
    assert page.read_text().partition("```")[0].endswith(f"\n\n{pairs.ON_DEVICES[page.stem]}\n\n")


def test_outputs_stay_while_the_code_is_the_same(pairs):
    page = "# New\n\n```{code-cell} ipython3\nx = 1\n```\n"
    before = pairs.paired(page)
    pairs.code(before)[0].execution_count = 1
    other_prose, other_code = page.replace("New", "Newer"), page.replace("x = 1", "x = 2")
    found = [pairs.kept(pairs.paired(text), before) for text in (other_prose, other_code)]
    assert [pairs.code(notebook)[0].execution_count for notebook in found] == [1, None]


def test_a_page_without_a_first_cell_is_refused(pairs):
    with pytest.raises(ValueError, match="new.md needs a title"):
        pairs.filled("# New\n\n```{code-cell} ipython3\nx = 1\n```\n", "new", "")


@pytest.mark.parametrize(("name", "most"), (("own_model", 40), ("own_drafter", 30)))
def test_what_is_written_oneself_is_as_short_as_promised(pairs, name, most):
    page = (DOCS / f"notebooks/{name}.md").read_text()
    (cell,) = (cell.source for cell in pairs.paired(page).cells if "\nclass " in cell.source)
    assert f"{most} lines" in page and len(cell.splitlines()) <= most
