"""Every unmask policy that is exported does what it declares, beside `fixed` without a cache: one token per pass, the
surest."""

import dataclasses
import functools
from typing import Any

import jax
import pytest
from support.guarantees import held
from support.oracles import ORACLES
from support.shapes import changed
from support.small_diffusion import LM, MASK, PROMPTS, begin, params, texts

import specjax
from specjax.assembly.companions import Stored
from specjax.assembly.registry import UNMASKS
from specjax.diffusion import Fixed, diffusion
from specjax.diffusion.unmask import Wrapper
from specjax.models import LlamaLM

FIELDS = {
    "guided": {"guide": LlamaLM(changed(LM.config, num_hidden_layers=1))},
    "klass": {"threshold": 0.2, "kl": 3.0, "history": 1},
    "longest_prefix": {"threshold": 0.3},
    "multi_block": {"threshold": 0.3},
    "levenshtein": {"delete_token_id": 5, "split_token_id": 7, "max_post_steps": 4},
    "learn2pd": {"threshold": 0.4, "block_length": 8, "hidden": 4},
    "prophet": {"early": 1.0, "middle": 0.5, "late": 0.2},
}
"""What a policy needs, and where its defaults do nothing on a model of random weights."""

ROWS = (0, 1, 2)
"""Those whose open positions are all at the end: a guide writes from left to right."""
HEATS = [0.0, 1.0, 0.7]


def policy_of(name):
    """A registered policy; one that stands before another stands before `fixed`, so that what differs is its own doing."""
    made, fields = UNMASKS[name].make(), FIELDS.get(name, {})
    if isinstance(made, Stored):
        return made.kind(**made.fields | fields)
    return dataclasses.replace(made, **fields, **({"inner": Fixed()} if isinstance(made, Wrapper) else {}))


@dataclasses.dataclass(frozen=True)
class Line:
    """A policy's decoder and its parameters."""

    decoder: Any
    model: Any

    def texts(self, temperature=0.0, rows=ROWS, eos=None):
        state = begin(self.decoder, rows, temperature, eos, model=self.model, slots=len(ROWS))
        return texts(specjax.run(self.decoder, self.model, state))[: len(rows)]


def line_of(policy):
    target = params()["target"]
    model = {"target": target, "guide": {**target, "layers": {0: target["layers"][0]}}}
    if hasattr(policy, "init_params"):
        model["unmask"] = policy.init_params(jax.random.key(0), target)
    return Line(diffusion(LM, MASK, policy, block_length=8), model)


@functools.cache
def plain(heats=(0.0, 0.0, 0.0), eos=None):
    return line_of(Fixed()).texts(list(heats), eos=eos)


def same_text(name, line):
    assert line.texts(HEATS) == plain(tuple(HEATS))
    assert line.texts() == plain() != plain(tuple(HEATS))


def own_text(name, line):
    assert name in ORACLES["UNMASKS"], "name its oracle in tests/support/oracles.py"


def lossy(name, line):
    """Greedy, and where a token that is written to the middle of a text ends it."""
    eos = plain()[0][len(PROMPTS[0]) + 9]
    differ = line.texts() != plain() or line.texts(eos=eos) != plain(eos=eos)
    assert differ, "it writes what `fixed` writes: say so, or give it fields in FIELDS"


@pytest.mark.parametrize("name", UNMASKS)
def test_a_policy_keeps_its_guarantee(name):
    line = line_of(policy_of(name))
    tests = {"same text": same_text, "own text": own_text, "lossy": lossy}
    held("unmask policy", name, UNMASKS[name], tests)(name, line)
    assert line.texts(HEATS)[2:] == line.texts(HEATS[2:] + [0.0] * 2, rows=(2,))  # whatever stands beside a row
