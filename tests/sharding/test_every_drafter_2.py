"""The second half of the conformance table on meshes: the text of one device, and weights that stay where they are."""

import pytest
from support.mesh_cases import OPTIMISED, SPLIT, keeps_the_text


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT[1::2])
def test_meshes_keep_the_text_and_the_weights(name):
    keeps_the_text(name, optimise=name in OPTIMISED)
