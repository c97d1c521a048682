"""What published diffusion samplers wrote on tiny models, and how this library's runs are compared with it."""

import contextlib
import functools
import json
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from specjax import models
from specjax.assembly.line import extended
from specjax.assembly.registry import make_cache, make_unmask
from specjax.decode import Diffusion
from specjax.models import ModelError
from specjax.serve.engine import Engine

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "diffusion_traces"
needs_traces = pytest.mark.skipif(
    not FOLDER.is_dir(),
    reason="needs the folder diffusion_traces in shared/data beside this checkout: put what the samplers wrote there",
)
REQUEST = ("temperature", "top_p", "top_k")  # arguments of a request; the others are those of an engine


@functools.cache
def _every_line():
    files = sorted(FOLDER.glob("traces*.jsonl"))
    return [_named(json.loads(text)) for file in files for text in file.read_text().splitlines()]


def _named(line):
    """A line whose call has this library's names where those of the folder are other ones."""
    call = line["call"]
    if call is not None and "unmask" in call:
        call["unmask"] = functools.reduce(lambda line, pair: line.replace(*pair), FIELDS.items(), call["unmask"])
        if line["sampler"].startswith("remdm") or call["unmask"].startswith("remdm"):
            call["unmask"] = call["unmask"].replace("remdm", "redo")
        if call["cache"] == "block_causal":
            del call["attention"]  # the cache says it
    return line


ENDS = {"logits_eos_inf": "never", "confidence_eos_eot_inf": "doubted"}
NAMES = {"cfg_scale": "guidance"}
FIELDS = {",whole=": ",complete=", "edit_threshold=": "editing_threshold=", "max_post_edit_steps=": "max_post_steps="}
"""Fields of policies' lines that are called otherwise here."""
WITH_OPENINGS = ("p2", "indel_sglang", "indel_fluxserve")
"""Samplers whose lines name the passes that opened a position, too."""
KNOWN = (*Diffusion.__dataclass_fields__, *ENDS, *NAMES, "filter")
"""What lines of the folder call the settings of a diffusion model."""


@functools.cache
def lines():
    """The lines of every setting that public calls can say, `{setting: [line]}`; empty where the folder is absent."""
    found = {}
    for line in _every_line():
        if line["call"] is not None and _can_be_said(line["model"], json.dumps(line["call"])):
            found.setdefault(line["setting"], []).append(line)
    return found


@functools.cache
def _can_be_said(name, call):
    """Whether there are the model's kind, the policies and the arguments of a call."""
    call = json.loads(call)
    if not call.keys() <= {*KNOWN, *REQUEST, "ignore_eos"} or "unmask" not in call:
        return False
    try:
        make_unmask(call["unmask"]), make_cache(call["cache"])
        config = json.loads((FOLDER / name / "config.json").read_text())
        return models.masked.kind_of(config) is not None and bool(models.masked.from_hf(config))
    except (ValueError, ModelError):
        return False


def lines_of(setting):
    """The lines of a setting, of those that no public call can say too."""
    return [line for line in _every_line() if line["setting"] == setting]


@functools.cache
def model(name):
    """One of the tiny models."""
    return models.load(FOLDER / name, dtype="float32")


def engine_of(line):
    """The engine that a line asks for."""
    call = {k: v for k, v in line["call"].items() if k not in (*REQUEST, "ignore_eos")}
    if "filter" in call:
        call["unmask"] = extended(call["unmask"], f"model={FOLDER / call.pop('filter')}")
    ends = [word for name, word in ENDS.items() if call.pop(name, False)]
    named = {NAMES.get(name, name): value for name, value in call.items() if value is not None}
    return Engine(model(line["model"]), Diffusion(**named, ends=" ".join(ends)))


@contextlib.contextmanager
def small_programs():
    """Rows are put in op by op, so that all settings share those ops, and a pass over a part of a canvas has one width in place
    of several, each of which would be a program of its own: a setting is nearly all compiling."""
    put_in = lambda decoder, params, state, rows, prompts, prefix: decoder.insert(params, state, rows, prompts)
    widths = lambda *_: ()
    with (
        mock.patch("specjax.decoder.insert_program", put_in),
        mock.patch("specjax.diffusion.decoder.widths", widths),
        mock.patch("specjax.diffusion.free_dave.widths", widths),
    ):
        yield


@small_programs()
def start(lines):
    """The engine of these lines, and a state that holds them."""
    engine = engine_of(lines[0])
    sampling = {k: v for k, v in lines[0]["call"].items() if k in REQUEST}
    sampling["ignore_eos"] = lines[0]["call"].get("ignore_eos", True)
    requests = [engine.request(line["prompt"], max_new_tokens=line["gen_length"], **sampling) for line in lines]
    return engine, engine.start(requests)


@small_programs()
def run(lines, decoder_of=lambda decoder: decoder):
    """The canvases of these lines before the first step and after each, `[N, B, L]`, and the last state."""
    engine, state = start(lines)
    decoder = decoder_of(engine.decoder)
    begin, most = state.tokens, 2 * max(line["passes"] for line in lines) + 4

    # such small programs run no longer than they are compiled
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def steps(params, state):
        def one(state, _):
            state, _ = decoder.step(params, state)
            return state, state.tokens

        return jax.lax.scan(one, state, None, length=most)

    state, seen = steps(engine.params, state)
    return np.concatenate([np.asarray(begin)[None], np.asarray(seen)]), state


def ranked(order):
    """Pass numbers, each replaced by its rank; a position's list may be empty, or a number."""
    passes = [[p] if isinstance(p, int) else list(p) for p in order]
    rank = {p: i for i, p in enumerate(sorted({p for one in passes for p in one}))}
    return [[rank[p] for p in one] for one in passes]


def differences(line, seen, state, row):
    """What of a line is different: words, none where it is reproduced."""
    begin = len(line["prompt"])
    end, mask_id = int(state.length[row]), model(line["model"]).diffusing.masked.mask_id
    canvas = seen[:, row, begin:end]
    moved = (canvas[1:] != canvas[:-1]) & ((canvas[1:] != mask_id) | (line["sampler"] in WITH_OPENINGS))
    changed = [np.flatnonzero(column).tolist() for column in moved.T]
    revises = any(isinstance(p, list) for p in line["order"])
    steps = int(state.stats.steps[row])
    compare, found = line["compare"], []
    if "tokens" in compare and canvas[-1].tolist() != line["tokens"]:
        found.append("tokens")
    if "order" in compare:
        order = changed if revises else [one[-1:] for one in changed]
        if ranked(order) != ranked(line["order"]):
            found.append("order")
    if "passes" in compare and not line["moving"] <= steps <= line["passes"]:
        found.append(f"passes {steps} not in {line['moving']}..{line['passes']}")
    if "at_most" in compare and not steps <= line["passes"]:
        found.append(f"passes {steps} above {line['passes']}")
    if "first" in compare:
        first = [i for i, p in enumerate(line["order"]) if (p if isinstance(p, int) else p[0]) == 0]
        if [i for i, p in enumerate(changed) if p[:1] == [0]] != first:
            found.append("first")
    return found
