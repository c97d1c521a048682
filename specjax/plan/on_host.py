"""What a model of experts needs of one chip if its experts lie in the host's memory, by `specjax plan --on-host` (HOBBIT,
arXiv:2411.01433).

Nothing is compiled: bytes are those of shapes. How often an expert is found on the chip, and which share of a token's experts
is in many or few bits, are the user's to give; `specjax.models.hobbit.cache` counts both for a model that is here.
"""

import dataclasses
from typing import Any

import jax

from specjax.models import formats
from specjax.models.few_bits import is_quantised
from specjax.plan import step
from specjax.plan.held import chip_bytes
from specjax.sharding.aot import Chip

GB = 1e9


@dataclasses.dataclass(frozen=True)
class OnHost:
    """What is given.

    Attributes:
      hits: shares of the experts that a step uses and that lie on the chip.
      high: the share of a token's experts that is used in many bits.
      low: the share in few. The rest is skipped.
      bits: the format in few bits, a line of `--weights`.
      link: GB per second from host to chip; 0: not known, and no time is given.
    """

    hits: tuple[float, ...] = (0.0, 0.5, 0.8, 0.95)
    high: float = 1.0
    low: float = 0.0
    bits: str = "int4"
    link: float = 0.0

    @classmethod
    def read(cls, line: str) -> "OnHost":
        """What a line says: `hits=0.5/0.9,high=0.7,low=0.25,bits=int4,link=55`; `default` says nothing.

        Raises:
          ValueError: on any other line.
        """
        fields: dict[str, Any] = {}
        for item in () if line == "default" else line.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            try:
                if name not in (known := [field.name for field in dataclasses.fields(cls)]):
                    raise ValueError(f"its fields are {', '.join(known)}")
                if name == "bits":
                    fields[name] = value
                else:
                    numbers = tuple(float(part) for part in (value.split("/") if name == "hits" else [value]))
                    fields[name] = numbers if name == "hits" else numbers[0]
            except ValueError as error:
                raise ValueError(f"--on-host: {item.strip()!r} is no field with a value ({error})") from None
        made = cls(**fields)
        shares = (*made.hits, made.high, made.low, made.high + made.low)
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError("--on-host: hits, high, low and high + low are shares from 0 to 1")
        if made.link < 0:
            raise ValueError("--on-host: link is GB per second, at least 0")
        form = formats.read_format(made.bits)
        if not isinstance(form, formats.Scaled) or form.of_vocab:
            raise ValueError(f"--on-host: bits is one of int8, int4 and fp8 with a group, got {made.bits!r}")
        return made


def record(asked: dict[str, Any], setup: step.Setup, model: Any, chip: Chip, given: OnHost) -> dict[str, Any]:
    """What `--json` prints. All bytes are of the whole model and one step.

    Args:
      asked: the request of the plan.
      setup: the decoder, on one chip.
      model: the target.
      chip: the topology's.
      given: see `OnHost`.

    Raises:
      ValueError: for a model without experts, or matrices that the format in few bits cannot hold.
    """
    own = setup.experts
    if own is None:
        raise ValueError(f"--on-host is for mixtures of experts, and {model.name} has none: leave it out")
    form = formats.read_format(given.bits)
    assert isinstance(form, formats.Format), "checked when it was read"
    many, few, units = _of_experts(setup.params["target"], form)
    held, each, small = step.sizes(setup), many // units, few // units
    device = held.arguments - many
    room = chip.hbm_bytes - device
    fit = lambda size: min(max(room, 0) // size, own.layers * own.count)
    count = own.layers * own.touched(own.nodes)
    moved = lambda hit, high, low: round(count * (1 - hit) * (high * each + low * small))
    rows = [
        {
            "hits": hit,
            "whole": moved(hit, 1, 0),
            "given": moved(hit, given.high, given.low),
            "few": moved(hit, 0, 1),
        }
        for hit in given.hits
    ]
    return {
        **asked, **dataclasses.asdict(given), "nodes": own.nodes, "layers": own.layers, "experts": own.count,
        "per_token": own.each, "touched": round(own.touched(own.nodes), 2), "device_bytes": device,
        "cache_bytes": held.cache, "host_bytes": {"many": many, "few": few}, "expert_bytes": {"many": each, "few": small},
        "limit": chip.hbm_bytes, "fits": room >= 0, "room": {"many": fit(each), "few": fit(small)},
        "moved": rows, "tokens": own.rows,
    }  # fmt: skip


def _of_experts(params: Any, form: formats.Format) -> tuple[int, int, int]:
    """Bytes of all experts as they are and in few bits, and how many there are in all layers.

    Raises:
      ValueError: if the format cannot hold them.
    """
    own, inputs = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantised):
        keys = [getattr(key, "key", None) for key in path]
        if "experts" in keys and (axis := formats.inputs_axis(path, False)) is not None:
            own.append((keys[-2], leaf, axis))
            inputs.append((str(keys[-2]), leaf.shape[axis]))
    form.check_groups(inputs)
    few = [form.shape(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), axis) for _, leaf, axis in own]
    units = sum(leaf.shape[0] for name, leaf, _ in own if name == "down")
    return chip_bytes([leaf for _, leaf, _ in own]), chip_bytes(few), units


def told(r: dict[str, Any], chip: Chip) -> str:
    """A record in words."""
    gb = lambda size: f"{size / GB:.3f} GB"
    many, few = r["host_bytes"]["many"], r["host_bytes"]["few"]
    skipped = max(1 - r["high"] - r["low"], 0)
    left = "" if r["fits"] else ", which is more than it has"
    kinds = f"{r['weights'] or r['dtype']} and {r['bits']}"
    lines = [
        f"{r['model']} {r['dtype']} on {r['topology']}, experts in the host's memory in {kinds}",
        f"step       {r['decoding']}, {r['nodes']} nodes, batch {r['batch']}, context {r['context']}",
        f"chip       {gb(r['device_bytes'])} besides experts, of which cache {gb(r['cache_bytes'])}, of {gb(r['limit'])}{left}",
        f"host       {gb(many + few)}: experts {gb(many)} in many bits, {gb(few)} in few",
        f"an expert  {r['expert_bytes']['many'] / 1e6:.2f} MB in many bits, {r['expert_bytes']['few'] / 1e6:.2f} MB in few",
        f"room       for {r['room']['many']} of {r['layers'] * r['experts']} experts in many bits, or {r['room']['few']} in "
        "few, without what a step takes besides",
        f"a step     uses about {r['touched']:.1f} of {r['experts']} experts in each of {r['layers']} layers, chosen evenly",
    ]
    head = (
        "on the chip",
        "GB moved, all in many bits",
        f"{r['high']:.0%} many, {r['low']:.0%} few, {skipped:.0%} none",
    )
    rows: list[tuple[str, ...]] = [(*head, "all in few")]
    time = lambda size: f" ({1e3 * size / (r['link'] * GB):.1f} ms)" if r["link"] else ""
    for row in r["moved"]:
        rows.append(
            (f"{row['hits']:.0%}", *(f"{row[way] / GB:.3f}{time(row[way])}" for way in ("whole", "given", "few")))
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(
        "shares of hits and of precisions are given, not measured; nothing is compiled, and temporaries are not counted"
    )
    if r["link"]:
        lines.append(
            f"ms are of {r['link']:g} GB/s from host to chip, which is given; {chip.name}'s own time is not in them"
        )
    return "\n".join(lines) + "\n"
