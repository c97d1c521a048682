"""The recipes are no part of the installed package: their tests find them in the repository."""

import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def experiments_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY))
