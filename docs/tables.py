"""`python docs/tables.py` writes the tables into the pages, between `<!-- table: NAME -->` and `<!-- end -->`, the parameters
of the warpers into `specjax/sampling_fields.py`, and the flags of the commands into `specjax/flags.py`.

Those of methods have a row each, in the registry's order; the measured figures are those that the folders of experiments hold.
"""

import functools
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from config_words import attention, ends, mlp, norms

from specjax import cli, models
from specjax.about import About, abouts
from specjax.assembly import registry
from specjax.assembly.registry import Entry
from specjax.bench.spec import TASKS, overview
from specjax.constrain.kinds import DISTRIBUTIONS, KINDS
from specjax.diffusion import Assd, ContextNgram
from specjax.models import LlamaLM, abstract, hf_config, tensors
from specjax.models.families.table import FAMILIES
from specjax.models.families.unsupported import UNSUPPORTED
from specjax.models.packed.table import FIELDS, FORMATS
from specjax.models.published_configs import CONFIGS
from specjax.plan.held import chip_bytes
from specjax.sampling_params import FIELDS as OF_WARPERS
from specjax.speculative import speculative
from specjax.warpers import WARPERS

FOLDER = Path(__file__).resolve().parent
FLAGS = FOLDER.parent / "specjax" / "flags.py"
SAMPLING = FOLDER.parent / "specjax" / "sampling_fields.py"
PAGES = FOLDER.parent / "README.md", *sorted(FOLDER.glob("*.md"))
NEEDS = {
    "model": "a model of the same vocabulary",
    "other_model": "a model of any vocabulary",
    "other_text": "a model of any vocabulary",
    "sorted_draft": "a model of the same vocabulary, best trained with exits",
    "masked_draft": "such a model, trained with masks",
    "fed_draft": "such a model, trained with masks and features",
    "block_draft": "such a model, and a target with an encoder",
    "diffusion_model": "a diffusion model of the same vocabulary",
    "diffusion_and_trigrams": "a diffusion model of the same vocabulary",
    "head": "a trained head",
    "own_head": "a target with such a layer",
    "pad": "a target that was trained with pads",
    "own_mask": "a target of both kinds",
    "datastore": "a datastore",
    "guide": "an autoregressive model of the same vocabulary",
    "filter": "a trained filter",
}
WINDOWED = "openai/gpt-oss-20b", "openai/gpt-oss-120b", "google/gemma-2-27b-it", "google/gemma-3-27b-it"
BATCHES = 1, 2, 4, 8, 32
EXACT = {"tiny": "`tiny`", "1B": "random, as Llama-3.2-1B"}
BEGIN = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def report(name: str) -> dict[str, Any]:
    """What a command printed, as a folder of experiments holds it."""
    return json.loads((FOLDER.parent / "experiments" / name).read_text())


def measured(name: str, row: str, figure: str) -> dict[str, float]:
    """A figure of a committed report, by what its rows call themselves up to the first colon; of equal names the first."""
    return {found[row].partition(":")[0]: found[figure] for found in reversed(report(name)["rows"])}


def needs(entries: Mapping[str, Entry]) -> dict[str, str]:
    """What is loaded beside the target for each method."""
    names = lambda entry: [part.partition(":")[0] for text in entry.parts.values() for part in text.split("+")]
    loads = lambda entry: [entry.loads, *(registry.DRAFTERS[name].loads for name in names(entry))]
    every = lambda entry: " and ".join(NEEDS[kind] for kind in loads(entry) if kind in NEEDS) or "nothing"
    found = lambda entry: "what its drafters need" if entry.apart else every(entry)
    return {name: found(entry) for name, entry in entries.items()}


def tokens_per_step(sampling: str) -> dict[str, float]:
    """Of every drafter that was measured on `tiny`, `greedy` or `sampled`; of several figures the one of the common run."""
    found: dict[str, float] = {}
    later = (f"drafters/{name}_{sampling}" for name in ("halves", "later", "newer", "speculators"))
    for file in (f"joined/{sampling}", f"lookups/{sampling}", *later, f"drafters/{sampling}"):
        found |= measured(f"{file}.json", "decoder", "tokens_per_step")
    return found


def drafters() -> Iterator[tuple[str, ...]]:
    """Every drafter but the one that drafts nothing, with tokens per step, greedy and at temperature 1."""
    greedy, sampled = map(tokens_per_step, ("greedy", "sampled"))
    entries = {name: entry for name, entry in registry.DRAFTERS.items() if name != "none"}
    yield "name", "drafts with", "needs", "tokens per step, greedy", "at temperature 1", "source"
    for name, entry in entries.items():
        shown = (f"{found[name]:.2f}" if name in found else "" for found in (greedy, sampled))
        yield f"`{name}`", entry.summary, needs(entries)[name], *shown, entry.source


def listed(entries: Mapping[str, Entry], what: str) -> Iterator[tuple[str, ...]]:
    """Every entry with what its text is worth, where any of them says so."""
    worth = any(entry.guarantee for entry in entries.values())
    yield "name", what, *(["text"] if worth else []), "source"
    for name, entry in entries.items():
        yield f"`{name}`", entry.summary, *([entry.guarantee] if worth else []), entry.source


def speeds() -> Iterator[tuple[str, ...]]:
    """Every measured drafter: tokens per step and ratios to plain, greedy at both widths and at temperature 1."""
    shown = ("greedy", "tokens_per_step"), ("wide", "ratio_to_plain"), ("greedy", "ratio_to_plain")
    shown += ("sampled", "tokens_per_step"), ("sampled", "ratio_to_plain")
    columns = [measured(f"drafters/{name}.json", "decoder", figure) for name, figure in shown]
    yield "drafter", "tokens per step, greedy", "ratio, 4x as wide", "ratio", "tokens per step, temperature 1", "ratio"
    for name in sorted(columns[2], key=columns[2].__getitem__, reverse=True):
        yield f"`{name}`", *(f"{column[name]:.2f}" if name in column else "" for column in columns)


def batches() -> Iterator[tuple[str, ...]]:
    """Ratios to plain decoding by how many rows decode together."""
    found = {rows: measured(f"defaults/batch_{rows}.json", "decoder", "ratio_to_plain") for rows in BATCHES}
    yield "drafter", *(f"{rows} row" if rows == 1 else f"{rows} rows" for rows in BATCHES)
    for name in found[1]:
        yield f"`{name}`", *(f"{found[rows][name]:.2f}" for rows in BATCHES)


def step_cost() -> Iterator[tuple[str, ...]]:
    """What a step takes by the nodes that it verifies."""
    found = report("bench/step_cost.json")["step_ms"]
    yield "nodes a step verifies", "ms", "times one node"
    for nodes, ms in found.items():
        yield nodes, f"{ms:.1f}", f"{ms / found['1']:.2f}"


def policies() -> Iterator[tuple[str, ...]]:
    """What the unmask and cache policies of the shipped diffusion model gain in speed and cost in right answers."""
    found = report("diffusion/eval.json")
    against = {paired["decoder"]: paired for paired in found["comparisons"]}
    yield (
        "decoder",
        "tokens per pass",
        "ratio to the first row",
        "right",
        "points against the first row, 95%",
        "verdict",
    )
    for row in (found, *found["decoders"]):
        paired = against.get(row["decoder"])
        speed = f"{paired['speed'] if paired else 1.0:.2f}"
        right = f"{100 * row['accuracy']:.1f}%"
        yield f"`{row['decoder']}`", f"{row['tokens_per_step']:.2f}", speed, right, *_cost(paired)


def _cost(paired: dict[str, Any] | None) -> tuple[str, str]:
    """Points of a comparison, and its verdict."""
    return (f"{100 * paired['low']:+.1f} to {100 * paired['high']:+.1f}", paired["verdict"]) if paired else ("", "")


def costs(name: str, option: str, first: str, size: Callable[[str | None], str]) -> Iterator[tuple[str, ...]]:
    """What values of an option take, how fast they are and what they cost the shipped model in right answers, against the
    `first` of them."""
    found = report(f"{name}/eval.json")
    against = {paired["decoder"]: paired for paired in found["comparisons"]}
    yield f"`{option}`", "takes", f"speed against {first}", "right", f"points against {first}, 95%", "verdict"
    for row in (found, *found["decoders"]):
        paired = against.get(row["decoder"])
        line = row["decoder"].removeprefix(f"{option}=") if paired else None
        speed, right = f"{paired['speed'] if paired else 1.0:.2f}", f"{100 * row['accuracy']:.1f}%"
        yield f"`{line}`" if line else first, size(line), speed, right, *_cost(paired)


def few_bits() -> Iterator[tuple[str, ...]]:
    """Of weights in few bits."""
    size = lambda line: f"{chip_bytes(abstract('tiny', 'float32', weights=line).params) / 1e6:.2f} MB"
    return costs("few_bits", "weights", "plain", size)


def cache_types() -> Iterator[tuple[str, ...]]:
    """Of caches in other types; they were not timed alone."""

    def size(line):
        lm = abstract("tiny", "float32", cache_dtype=line).lm
        return f"{chip_bytes(jax.eval_shape(lambda: lm.init_cache(1, 512, jnp.float32))) / 1e6:.2f} MB"

    for row in costs("cache_types", "cache_dtype", "float32", size):
        yield *row[:2], *row[3:]


def few_bits_tasks() -> Iterator[tuple[str, ...]]:
    """The same answers by task, with the interval of each."""
    found = report("few_bits/eval.json")
    rows = {row["decoder"].removeprefix("weights="): row["families"] for row in (found, *found["decoders"])}
    yield "task", "plain", *(f"`{line}`" for line in list(rows)[1:])
    for task in found["families"]:
        own = (row[task] for row in rows.values())
        yield task, *(f"{100 * r['accuracy']:.0f} ({100 * r['low']:.0f} to {100 * r['high']:.0f})" for r in own)


def exact() -> Iterator[tuple[str, ...]]:
    """What bfloat16 weights take with coded exponents."""
    yield "model", "`weights`", "parameters", "of plain", "bits of a coded number", "every bit back"
    for model, name in EXACT.items():
        own = {line: row for line, row in report("few_bits/exact.json")[model].items() if line != "speed"}
        for line, row in own.items():
            size = f"{row['bytes'] / 1e6:,.2f} of {row['plain'] / 1e6:,.2f} MB"
            back = "yes" if row["equal"] else "no"
            yield name, f"`{line}`", size, f"{row['bytes'] / row['plain']:.1%}", f"{row['bits_a_number']:.2f}", back


def exact_speed() -> Iterator[tuple[str, ...]]:
    """What a step with them costs on a CPU."""
    yield "model", "`weights`", "tokens/s, one row", "parameters", "temporaries", "text of plain"
    for model, name in EXACT.items():
        name = name if model == "tiny" else f"{name}, 2 layers"
        for line, row in report("few_bits/exact.json")[model]["speed"].items():
            sizes = (f"{row[part] / 1e6:,.1f} MB" for part in ("parameters", "temporaries"))
            text = "" if line == "plain" else "yes" if row["same_text"] else "no"
            yield name, f"`{line}`" if text else line, f"{row['tokens_per_second']:.1f}", *sizes, text


def warpers() -> Iterator[tuple[str, ...]]:
    """Every warper with its options, what its text is worth, and whether it is for diffusion models too."""
    gapped = {name: kind.fills or not (kind.of_logits or kind.reads_text) for kind in WARPERS for name in _names(kind)}
    yield "name", "what it does", "options", "text", "of diffusion models", "source"
    for name, entry in registry.WARPERS.items():
        options = ", ".join(f"`{option}`" for option in entry.fields)
        yield f"`{name}`", entry.summary, options, entry.guarantee, "too" if gapped[name] else "refused", entry.source


SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
}  # fmt: skip
SHOWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4},
    "bailing_moe": {"num_experts": 16},
    "phimoe": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "head_dim": 16, "rotary_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "olmoe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {"n_routed_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "granite": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS | {"num_local_experts": 4},
    "granitemoehybrid": _MULTIPLIERS
    | {
        "layer_types": ["mamba", "mamba", "attention"] * 4,
        "num_local_experts": 4,
        "mamba_n_heads": 4,
    },
    "bamba": {"attn_layer_indices": [5, 11], "mamba_n_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron_h": {"hybrid_override_pattern": "M-M-M*-M-M-E"},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "lfm2": {"full_attn_idxs": [2, 5, 8]},
    "minicpm": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "lfm2_moe": {"layer_types": (["conv"] * 2 + ["full_attention"]) * 4, "num_experts": 4},
}
"""Fields without which a file would not be one of the family."""


def families() -> Iterator[tuple[str, ...]]:
    """What sets the architectures that `load` reads apart, as their configs have it where a file says no more than sizes."""
    yield "architecture", "norms", "attention", "layers with a window", "MLP", "embeddings and logits", "a file may say"
    for kind, family in FAMILIES.items():
        config = hf_config.from_hf(SIZES | {"model_type": kind} | SHOWN.get(kind, {}))
        windows = sum(config.window(i) is not None for i in range(config.num_hidden_layers))
        several = f"{windows} of {config.num_hidden_layers}" if 0 < windows < config.num_hidden_layers else "all"
        parts = norms(config), attention(config), several if windows else "", mlp(config), ends(config)
        yield f"`{family.architecture}`", *parts, family.note


def refused() -> Iterator[tuple[str, ...]]:
    """Architectures that are asked for and not read, and why."""
    yield "architecture", "why not"
    for names, why in UNSUPPORTED.items():
        yield ", ".join(f"`{name}`" for name in names), why


def configs() -> Iterator[tuple[str, ...]]:
    """The built-in configurations, by their architecture."""
    by: dict[str, list[str]] = {}
    for name, config in CONFIGS.items():
        by.setdefault((config.get("architectures") or [FAMILIES[config["model_type"]].architecture])[0], []).append(
            name
        )
    yield "architecture", "built-in configurations"
    for architecture, names in by.items():
        yield f"`{architecture}`", ", ".join(f"`{name}`" for name in names)


def weights() -> Iterator[tuple[str, ...]]:
    """What the parameters of two models take in each format."""
    size = lambda name, line: chip_bytes(abstract(name, "bfloat16", weights=line).params)
    yield "`weights`", "`tiny`", "Llama-3.1-8B"
    lines = (
        "int8",
        "fp8",
        "int4",
        "int4:group=32",
        "dfloat11",
        "int8:vocab=true",
        "int4:vocab=true",
        "dfloat11:vocab=true",
    )
    for line in (None, *lines):
        small, large = size("tiny", line) / 1e6, size("meta-llama/Llama-3.1-8B", line) / 1e9
        yield "plain" if line is None else f"`{line}`", f"{small:.2f} MB", f"{large:.2f} GB"


def packed() -> Iterator[tuple[str, ...]]:
    """Formats of packed weights, by `quant_method` or by the field that describes them."""
    yield "`quant_method`, or field", "read", "refused"
    for name, form in (FORMATS | FIELDS).items():
        yield f"`{name}`", form.reads, form.refuses


def rings() -> Iterator[tuple[str, ...]]:
    """Bytes of a row's cache of 32,768 tokens, whole and with rings."""
    tokens, dtype = 32768, jnp.bfloat16
    yield "model", "layers with a window", "window", "whole cache", "with rings"
    for name in WINDOWED:
        lm = LlamaLM(hf_config.from_hf(CONFIGS[name]))
        windows = [lm.config.window(i) for i in range(lm.num_layers)]
        sizes = []
        for rings in (False, True):
            target = speculative(lm).with_rings().target if rings else lm
            cache = jax.eval_shape(lambda target=target: target.init_cache(1, tokens, dtype))
            sizes.append(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)))
        several = f"{sum(window is not None for window in windows)} of {len(windows)}"
        yield f"`{name}`", several, str(lm.config.near.window), *(f"{size / 1e9:.2f} GB" for size in sizes)


_DRAFTERS = {name: entry for name, entry in registry.DRAFTERS.items() if name != "none"}
_LOADED = {
    "model": "drafts",
    "other_model": "drafts",
    "other_text": "drafts",
    "sorted_draft": "drafts",
    "masked_draft": "drafts",
    "fed_draft": "drafts",
    "block_draft": "drafts",
    "diffusion_model": "drafts",
    "diffusion_and_trigrams": "drafts",
    "head": "heads",
    "own_head": "heads",
    "pad": "self_speculation",
    "own_mask": "self_speculation",
    "self_or_model": "self_speculation",
    "vectors": "self_speculation",
    "texts": "retrieval",
    "datastore": "retrieval",
    "": "retrieval",
}
_HOMES: tuple[tuple[Mapping[str, Entry | About], str, str], ...] = (
    (_DRAFTERS, "drafters", ""),
    (registry.EXPANDERS, "drafters", "trees"),
    (registry.RULES, "drafters", "lengths"),
    (registry.VERIFIERS, "verifiers", "verification"),
    (registry.SEARCHES, "searches", "searches"),
    (registry.STEPWISE, "searches", "searches"),
    (registry.SELECTIONS, "searches", "choosing"),
    (registry.MIXERS, "samplers", "mixtures"),
    (registry.OLDS, "memory", "older"),
    (registry.UNMASKS, "diffusion", "masked"),
    (registry.SAMPLERS, "diffusion", "renoising"),
    (registry.CACHES, "diffusion", "caching"),
    ({about.name: about for kind in (Assd, ContextNgram) for about in abouts(kind)}, "diffusion", "any_subset"),
)
"""Methods, the page that describes them, and their class in the survey; of drafters it follows from what is loaded for them."""
_APART = {
    "drafts": ("rasd", "switch"),
    "self_speculation": ("kangaroo", "swift", "del", "small_cache", "magicdec"),
    "jacobi": ("lookahead", "jacobi"),
    "blocks": ("sequential",),
    "early_commit": ("prophet", "end_of_text"),
    "verified": ("free_dave", "guided"),
    "edits": ("redo", "remdm", "wino", "rediff", "joint_threshold", "levenshtein", "rcr"),
}
"""Classes of drafters and policies of which their home says another one."""
_CLASSES = {name: kind for kind, names in _APART.items() for name in names}
SURVEY = (*_LOADED.values(), *(kind for _, _, kind in _HOMES if kind), *_APART)
"""The classes of the survey, some of them several times."""


def survey(kind: str) -> Iterator[tuple[str, ...]]:
    """The methods of a class, wherever they live."""
    yield "method", "what it does", "source"
    for entries, page, usual in _HOMES:
        for name, entry in entries.items():
            if kind == (_CLASSES.get(name) or usual or _LOADED[entry.loads]):
                yield f"[`{name}`]({page}.md)", entry.summary, entry.source


def shipped() -> Iterator[tuple[str, ...]]:
    """The models that come with the package, as their files say."""
    yield "model", "architecture", "parameters", "layers", "width", "vocabulary", "on disk"
    for name, folder in models.shipped().items():
        config = json.loads((folder / "config.json").read_text())
        sizes = (str(config[field]) for field in ("num_hidden_layers", "hidden_size"))
        vocabulary = f"{config['vocab_size']:,}"
        yield f"`{name}`", f"`{config['architectures'][0]}`", _numbers(folder), *sizes, vocabulary, _disk(folder)


def shipped_right() -> Iterator[tuple[str, ...]]:
    """Right answers of the shipped models by family."""
    yield "family", "`tiny`", "`tiny-diffusion`"
    target, masked = (report(f"{name}/eval.json") for name in ("pretrain", "diffusion"))
    shown = lambda row: f"{row['accuracy']:.1%} ({100 * row['low']:.1f} to {100 * row['high']:.1f})" if row else ""
    for name, row in target["families"].items():
        yield f"`{name}`", shown(row), shown(masked["families"].get(name))
    yield "all", shown(target), shown(masked)


def shipped_heads() -> Iterator[tuple[str, ...]]:
    """What is shipped beside the targets: sizes, training, and tokens per step, greedy and at temperature 1."""
    recipes = {
        target: tomllib.loads((FOLDER.parent / "experiments" / folder / "config.toml").read_text())["heads"]
        for target, folder in (("tiny", "drafters"), ("smollm2", "smollm2"))
    }
    figures = {
        "tiny": [tokens_per_step("greedy"), tokens_per_step("sampled")],
        "smollm2": [spec_bench("one_row"), spec_bench("sampled")],
    }
    yield "head", "numbers", "on disk", "updates", "tokens per step, greedy", "at temperature 1"
    for folder in sorted(
        file.parent for file in (Path(models.__file__).parent / "pretrained/heads").glob("*/config.json")
    ):
        name = json.loads((folder / "config.json").read_text())["drafter"]
        target = folder.name.partition("-")[0]
        steps = str(recipes[target][name]["steps"]) if name in recipes[target] else ""
        found = (f"{column[name]:.2f}" if name in column else "" for column in figures[target])
        yield f"`{folder.name}`", _numbers(folder), _disk(folder), steps, *found


def spec_bench(name: str) -> dict[str, float]:
    """Tokens per step of our decoders in a run of Spec-Bench on SmolLM2."""
    rows = report(f"smollm2/{name}.json")["rows"]
    return {row["decoder"]: row["overall"]["mean_accepted"] for row in rows if row["overall"]["mean_accepted"]}


def smollm2_drafters() -> Iterator[tuple[str, ...]]:
    """Our decoders in the same run, from the fastest: tokens per step, and speed over plain decoding by task."""
    rows = [row for row in report("smollm2/one_row.json")["rows"] if row["overall"]["mean_accepted"]]
    yield "drafter", "tokens per step", "ratio to plain", *(task.replace("_", " ") for task in TASKS)
    for row in sorted(rows, key=lambda row: -row["overall"]["speedup"]):
        speeds = row["overall"]["speedup"], *(row["tasks"][task]["speedup"] for task in TASKS)
        yield f"`{row['decoder']}`", f"{row['overall']['mean_accepted']:.2f}", *(f"{speed:.2f}" for speed in speeds)


def _numbers(folder: Path) -> str:
    """How many numbers a folder's tensors hold."""
    return f"{sum(math.prod(tensor.shape) for tensor in tensors.read_folder(folder).values()):,}"


def _disk(folder: Path) -> str:
    size = sum(file.stat().st_size for file in folder.iterdir())
    return f"{size / 1e6:.2f} MB" if size > 1e5 else f"{size / 1e3:.1f} kB"


def _names(method: Any) -> list[str]:
    return [about.name for about in abouts(type(method))]


def constraints() -> Iterator[tuple[str, ...]]:
    """The kinds of constraints."""
    code = lambda texts: ", ".join(f"`{text}`" for text in texts)
    yield "kind", "line", "every text is", "as an object, in Python or in a line of a file", "followed on", "holds for"
    for name, own in KINDS.items():
        yield f"`{name}`", code(own.forms), own.summary, code(own.objects), f"the {own.place}", own.guarantee


def distributions() -> Iterator[tuple[str, ...]]:
    """How texts under a constraint are distributed, by the way to decode or the option."""
    yield "`--decode`, or an option", "distribution", "texts"
    for name, word in registry.aligned().items():
        yield f"`{name}`" if {name} & {*registry.SEARCHES, *registry.WARPERS} else name, word, DISTRIBUTIONS[word]


TABLES = {
    "constraints": constraints,
    "distributions": distributions,
    "drafters": drafters,
    "rules": lambda: listed(registry.RULES, "a chain ends"),
    "expanders": lambda: listed(registry.EXPANDERS, "grows"),
    "warpers": warpers,
    "searches": lambda: listed(registry.SEARCHES, "finds"),
    "stepwise": lambda: listed(registry.STEPWISE, "writes"),
    "mixers": lambda: listed(registry.MIXERS, "a thinking row reads"),
    "selections": lambda: listed(registry.SELECTIONS, "takes"),
    "verifiers": lambda: listed(registry.VERIFIERS, "keeps"),
    "unmask": lambda: listed(registry.UNMASKS, "commits"),
    "samplers": lambda: listed(registry.SAMPLERS, "commits"),
    "caches": lambda: listed(registry.CACHES, "reuses"),
    "olds": lambda: listed(registry.OLDS, "of older tokens"),
    "speeds": speeds,
    "batches": batches,
    "step_cost": step_cost,
    "policies": policies,
    "families": families,
    "refused": refused,
    "configs": configs,
    "packed": packed,
    "weights": weights,
    "few_bits": few_bits,
    "cache_types": cache_types,
    "few_bits_tasks": few_bits_tasks,
    "exact": exact,
    "exact_speed": exact_speed,
    "rings": rings,
    "shipped": shipped,
    "shipped_right": shipped_right,
    "shipped_heads": shipped_heads,
    "smollm2": lambda: overview(report("smollm2/peers.json")["rows"]),
    "smollm2_drafters": smollm2_drafters,
    **{f"survey_{kind}": functools.partial(survey, kind) for kind in SURVEY},
}


def written(name: str) -> str:
    """A table as Markdown."""
    head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in TABLES[name]())
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def filled(page: str) -> str:
    """A page with its tables as the registry has them now."""
    return BEGIN.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{written(found[1])}\n<!-- end -->", page)


def flags() -> str:
    """`specjax/flags.py` with the words of every command, so that these are known before jax comes in."""
    lines = []
    for name in cli.COMMANDS:
        words = f"{name}: {' '.join(cli.parser_of(name).words)}"
        lines += textwrap.wrap(words, 118, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    begin, _, rest = FLAGS.read_text().partition('WORDS = """\\\n')
    _, quotes, end = rest.partition('"""')
    return "".join((begin, 'WORDS = """\\\n', *(f"{line}\n" for line in lines), quotes, end))


def sampling_fields() -> str:
    """`specjax/sampling_fields.py` with a typed field for every parameter of a warper."""
    begin, mark, _ = SAMPLING.read_text().partition('    """\n\n')
    lines = []
    for field in OF_WARPERS.values():
        kind = "Any" if "shape" in field.metadata else f"{'int' if field.type is int else 'float'} | None"
        lines.append(f"    {field.name}: {kind} = None\n")
    return "".join((begin, mark, *lines))


def main() -> None:
    """Writes the tables of all pages."""
    SAMPLING.write_text(sampling_fields())
    FLAGS.write_text(flags())
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
