"""Pages of experiments have the tables of their results."""

import json

import pytest

from experiments.online import __main__ as online
from experiments.pipelined import __main__ as pipelined


@pytest.mark.parametrize("experiment", [online, pipelined], ids=["online", "pipelined"])
def test_the_page_has_its_table(experiment):
    page = experiment.RESULTS.with_name("README.md").read_text()
    assert experiment.table(json.loads(experiment.RESULTS.read_text())) in page
