"""`python docs/pairs.py` writes every notebook's badges, what it does on which device, and its first cell. It also writes the
`.ipynb` beside its `.md`, which Colab and Kaggle open.

The `.md` is the one to edit; the site executes and shows it. An `.ipynb` keeps the outputs of its last execution while its
code is the same; `python docs/pairs.py --execute` executes those that have none (needs the extra docs). Badges and what the
first cell installs follow from the repository's address, which pyproject.toml has as `Repository` under `[project.urls]`. While
there is none, there is no badge, and the cell says how to install from a clone; the command says so too.
"""

import argparse
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import jupytext
import nbformat

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = FOLDER / "notebooks"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
KAGGLE = "[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
TITLE = re.compile(r"^(# .*\n)(?:\n\[!\[Open in Colab\].*\n)?", re.MULTILINE)
FIRST = re.compile(
    r"(?:\*On a (?:GPU|TPU)[^\n]*\*\n\n)?(```\{code-cell\} ipython3\n:tags: \[hide-input\]\n\n).*?(```\n)", re.DOTALL
)
ON_DEVICES = {
    "diffusion": "*On a GPU or a TPU every cell runs there, on one chip, in bfloat16.*",
    "inside_a_step": "*On a GPU or a TPU every cell runs there, on one chip, in bfloat16.*",
    "killed_job": "*On a GPU or a TPU this process holds the device, so the jobs, which are other processes, run on the CPU.*",
    "own_drafter": "*On a GPU or a TPU every cell runs there, on one chip, in bfloat16.*",
    "own_model": "*On a GPU or a TPU training and decoding run there, on one chip.*",
    "quick_start": "*On a GPU or a TPU every cell runs there, on one chip, in bfloat16.*",
    "shard": "*On a TPU or GPU machine with eight devices the mesh takes them; with fewer, set `JAX_PLATFORMS=cpu` first.*",
    "train_eagle3": "*On a GPU or a TPU training and decoding run there, on one chip.*",
    "what_fits": "*On a GPU or a TPU nothing runs there: sizes are computed, and steps compiled on the CPU.*",
}
"""What the cells of each notebook do where there is such a device."""
BEFORE = {"shard": 'jax.config.update("jax_num_cpu_devices", 8)  # a CPU counts as eight; real ones stay as many\n'}
SETUP = """\
import glob
import importlib.util
import os

if {{"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}} & set(os.environ):
    found = importlib.util.find_spec("specjax")
    if not (found and found.origin):  # a mere folder has no origin
        tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
        extras = "plot" + (",tpu" if tpu else ",cuda12" if glob.glob("/dev/nvidia[0-9]*") else "")
        {install}

import jax

{before}print(jax.devices())
"""
FROM_ADDRESS = """get_ipython().run_line_magic("pip", f"install -q 'specjax[{extras}] @ git+ADDRESS'")"""
FROM_CLONE = """raise RuntimeError(f"bring a clone of specjax here, then: %pip install './specjax[{extras}]'")"""


def repository() -> str:
    """The public address, or nothing while there is none."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository", "")


def filled(page: str, name: str, address: str) -> str:
    """A notebook's `.md` with the badges and the first cell that follow from the address, and what it does on which device.

    Raises:
      ValueError: where it has no title or no first cell to fill.
    """
    where = address.replace("https://github.com/", "https://colab.research.google.com/github/").removesuffix(".git")
    file = f"blob/main/docs/notebooks/{name}.ipynb"
    kaggle = f"{KAGGLE}(https://kaggle.com/kernels/welcome?src={address.removesuffix('.git')}/{file})"
    badge = f"\n{BADGE}({where}/{file}) {kaggle}\n" if address else ""
    install = FROM_ADDRESS.replace("ADDRESS", address) if address else FROM_CLONE
    cell = SETUP.format(install=install, before=BEFORE.get(name, ""))
    page, titles = TITLE.subn(lambda found: found[1] + badge, page, count=1)
    page, cells = FIRST.subn(lambda found: f"{ON_DEVICES[name]}\n\n{found[1]}{cell}{found[2]}", page, count=1)
    if not titles or not cells:
        raise ValueError(f"{name}.md needs a title, and a first code cell tagged hide-input")
    return page


def paired(page: str) -> Any:
    """The notebook of a `.md`, without outputs, the same one every time."""
    notebook = jupytext.reads(page, fmt="md:myst")
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    return notebook


def code(notebook: Any) -> list[Any]:
    """Its code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kept(notebook: Any, before: Any) -> Any:
    """The notebook with the outputs that it had before, if all of its code is the same."""
    if [cell.source for cell in code(notebook)] == [cell.source for cell in code(before)]:
        for cell, old in zip(code(notebook), code(before), strict=True):
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return notebook


def executed(notebook: Any) -> Any:
    """The notebook with outputs, run in an empty folder; what went to stderr (progress bars) and times are left out."""
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for cell in code(notebook):
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main() -> None:
    """Writes all pairs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--execute", action="store_true", help="execute the notebooks that have no outputs")
    execute = parser.parse_args().execute
    if not repository():
        print("pyproject.toml has no Repository under [project.urls], so the notebooks have no badges")
    for path in sorted(NOTEBOOKS.glob("*.md")):
        page = filled(path.read_text(), path.stem, repository())
        path.write_text(page)
        notebook, stored = paired(page), path.with_suffix(".ipynb")
        if stored.exists():
            notebook = kept(notebook, nbformat.read(stored, as_version=4))
        if execute and any(cell.execution_count is None for cell in code(notebook)):
            print(path.stem, flush=True)
            notebook = executed(notebook)
        stored.write_text(nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    main()
