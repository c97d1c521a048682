"""The site: `pip install -e '.[docs]' && sphinx-build -W -b html docs docs/_build/html`.

Name, version and addresses are those of pyproject.toml: where it names no repository, pages have no link to one.
"""

import inspect
import re
import tomllib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PROJECT = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT.get("urls", {}).get("Repository", "")

project = PROJECT["name"]
author = project
version = release = PROJECT["version"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_design"]
exclude_patterns = ["_build", "notebooks/*.ipynb"]  # the other halves of the notebooks

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "cache"  # a notebook runs again when its code has changed
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # seconds per cell; the longest takes one minute where nothing else runs
nb_execution_in_temp = True
nb_output_stderr = "remove"  # bars

default_role = "py:obj"  # a name in backquotes links where it is documented
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "sphinx_book_theme"
html_title = project
html_theme_options = {
    "show_toc_level": 2,
    "navbar_persistent": [],  # the sidebar's search box is enough
    **({"repository_url": REPOSITORY, "use_repository_button": True, "path_to_docs": "docs"} if REPOSITORY else {}),
}


MOST = 20


def short_signature(app, what: str, name: str, thing, options, signature: str | None, returns: str | None):
    """A class of options has more fields than a reader takes in: they are listed below it, and its signature is `(...)`."""
    try:
        count = len(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return None
    return ("(...)", returns) if count > MOST else None


def on_the_site(app, page: str, text: list[str]) -> None:
    """Links to an experiment's README, which a reader of the files follows, lead to the page that includes it."""
    text[0] = re.sub(r"\]\(\.\./experiments/(\w+)/README\.md(#[\w-]+)?\)", r"](/experiments/\1.md\2)", text[0])


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("source-read", on_the_site)
    app.connect("autodoc-process-signature", short_signature)
