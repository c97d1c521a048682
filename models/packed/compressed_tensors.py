"""compressed-tensors (the vLLM project's format, which llm-compressor writes): a scheme for each group of modules.

Weights are stored in one of three ways:

- `weight` holds plain int8 or float8 numbers.
- `weight_packed` holds integers of 1 to 8 bits, each plus 2^(bits - 1), packed along a row. Zero points are packed in
  the same way, but along the rows.
- `weight_packed` holds floats of 4 bits (`specjax.models.packed.float4`).

There is one scale for all numbers (`tensor`), per row (`channel`), or for some neighbours of a row (`group`) or of both
axes (`block`). Settings for activations are not applied: activations stay in the model's type.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import an_object, is_size, shown
from specjax.models.packed import base, float4
from specjax.models.packed.base import Format, Parts, Unpack
from specjax.models.tensors import Tensor

_METHOD = "compressed-tensors"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *float4.GROUPS)
_MIXED = "mixed-precision"  # every group of modules names its own format
_ORDERED = ("group", "dynamic")  # two words for columns that are assigned to groups in a special order
_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
)
"""Tensors with scales for activations or the cache, which are ignored."""
_FIELDS = frozenset(
    "num_bits type strategy group_size symmetric actorder block_structure dynamic observer observer_kwargs scale_dtype "
    "zp_dtype".split()
)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are stored.

    Attributes:
      targets: which modules these are.
      form: how they are stored.
      packed: whether integers are packed into words.
      bits: the bits of a number.
      integer: whether numbers are integers.
      strategy: which numbers share a scale.
      block: how many rows and columns share a scale; None: all.
      symmetric: whether there are no zero points.
      ordered: whether the file says to which group each column belongs.
    """

    targets: tuple[str, ...]
    form: str
    packed: bool
    bits: int
    integer: bool
    strategy: str
    block: tuple[int | None, int | None]
    symmetric: bool
    ordered: bool

    def __str__(self) -> str:
        parts = f"{self.bits} bits", self.strategy, "symmetric" if self.symmetric else "zero points"
        return ", ".join((*parts, f"blocks of {list(self.block)}") if any(self.block) else parts)


def read(config: dict[str, Any]) -> Unpack:
    """A function that unpacks the modules of a `quantization_config`.

    Raises:
      ModelError: on unsupported settings.
    """
    base.check_off(config, _METHOD, "transform_config", "moe_sparsity_config")
    sparse = an_object("sparsity_config", config.get("sparsity_config"))
    base.check_is({"sparsity format": sparse.get("format") or "dense"}, _METHOD, **{"sparsity format": ("dense",)})
    groups = an_object("config_groups", config.get("config_groups"))
    schemes = [
        _scheme(an_object(f"config_groups: {name}", group), config.get("format")) for name, group in groups.items()
    ]
    if not schemes:
        raise ModelError("config.json: quantization_config of compressed-tensors needs config_groups")
    ignored = [_matcher(name) for name in base.strings(config, "ignore")]

    def unpack(module: str, parts: Parts) -> Parts:
        parts = {name: tensor for name, tensor in parts.items() if name not in _ACTIVATIONS}
        if not {"weight_packed", "weight_scale"} & set(parts):
            return parts
        base.check_left_out(module, any(match(module) for match in ignored), "ignore")
        return _unpacked(module, parts, _chosen(module, schemes))

    return unpack


def _scheme(group: dict[str, Any], usual: Any) -> Scheme:
    """The scheme of a group of modules."""
    own = group.get("format")
    kind = own if usual in (None, _MIXED) else usual
    if own not in (None, kind):
        raise ModelError(f"config.json: a group of modules has format {shown(own)}, and all have {shown(usual)}")
    base.check_is({"format": kind}, _METHOD, format=_FORMATS)
    said = an_object("weights", group.get("weights"))
    base.check_off(said, _METHOD, *sorted(set(said) - _FIELDS))
    base.check_off(said, _METHOD, "dynamic")
    if kind in float4.GROUPS:
        return _float4(group, said, str(kind))
    base.check_is(
        said, _METHOD, type=("int", "float"), strategy=("channel", "tensor", "group", "block"), symmetric=(True, False),
        actorder=(None, False, "weight", "static", *_ORDERED), num_bits=tuple(range(8, 0, -1)),
    )  # fmt: skip
    width, integer = said.get("num_bits", 8), said.get("type", "int") == "int"
    strategy, symmetric, packed = said.get("strategy"), said.get("symmetric", True), kind == "pack-quantized"
    fits = kind == "naive-quantized" or integer == (kind != "float-quantized")
    if not fits or not (integer or (width == 8 and symmetric)):
        raise ModelError(
            f"config.json: {_METHOD} weights in {kind} of type {shown(said.get('type', 'int'))}, {width} bits and symmetric "
            f"{symmetric} are not read"
        )
    ordered = said.get("actorder") in _ORDERED
    if strategy is None or (ordered and strategy != "group"):
        raise ModelError(
            f"config.json: {_METHOD} weights with strategy {shown(strategy)} and actorder {ordered} are not read"
        )
    targets, block = tuple(base.strings(group, "targets")), _block(said, strategy)
    return Scheme(targets, str(kind), packed, width, integer, strategy, block, symmetric, ordered)


def _float4(group: dict[str, Any], said: dict[str, Any], kind: str) -> Scheme:
    """The scheme of a group of modules with floats of 4 bits."""
    wide, strategy = float4.GROUPS[kind], "tensor_group" if kind.startswith("nv") else "group"
    base.check_is(
        said, _METHOD, num_bits=(4,), type=("float",), strategy=(strategy,), group_size=(wide,), symmetric=(True,)
    )
    return Scheme(tuple(base.strings(group, "targets")), kind, True, 4, False, strategy, (1, wide), True, False)


def _block(said: dict[str, Any], strategy: str) -> tuple[int | None, int | None]:
    """How many rows and columns share a scale."""
    if strategy == "group":
        wide = said.get("group_size")
        if not is_size(wide):
            raise ModelError(f"config.json: {_METHOD} weights with group_size {shown(wide)} are not read")
        return 1, wide
    if strategy == "block":
        both = said.get("block_structure")
        if not (isinstance(both, list) and len(both) == 2 and all(map(is_size, both))):
            raise ModelError(f"config.json: {_METHOD} weights with block_structure {shown(both)} are not read")
        return both[0], both[1]
    return (1, None) if strategy == "channel" else (None, None)


def _matcher(name: str) -> Callable[[str], bool]:
    """A function that says whether a module matches a name, or `re:` and a regular expression."""
    if not name.startswith("re:"):
        return lambda module: module == name
    try:
        found = re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise ModelError(f"config.json: quantization_config has {shown(name)}: {error}") from error
    return lambda module: found.match(module) is not None


def _chosen(module: str, schemes: list[Scheme]) -> Scheme:
    """A module's scheme: the one that names it, otherwise one whose expression matches, otherwise that of all linear
    layers."""
    ways: tuple[Callable[[str], bool], ...] = (
        lambda name: name == module,
        lambda name: name.startswith("re:") and _matcher(name)(module),
        lambda name: name == "Linear",
    )
    for way in ways:
        for scheme in schemes:
            if any(map(way, scheme.targets)):
                return scheme
    named = sorted({name for scheme in schemes for name in scheme.targets})
    raise ModelError(f"{module} is packed, but no target of config_groups names it: {shown(named)}")


def _unpacked(module: str, parts: Parts, scheme: Scheme) -> Parts:
    """A module's tensors with its plain weight."""
    if scheme.form in float4.GROUPS:
        return float4.unpacked(module, parts, scheme.form)
    out, wide = _shape(module, parts, scheme)
    tall_block, wide_block = scheme.block[0] or out, scheme.block[1] or wide
    scales = -(-out // tall_block), -(-wide // wide_block)
    codes = f"weight{'_packed' if scheme.packed else ''}"
    words = lambda count: -(-count * scheme.bits // 32)
    stored = [(1,), ()] if scheme.strategy == "tensor" else [scales]
    shape = next(
        (shape for shape in stored if "weight_scale" in parts and parts["weight_scale"].shape == shape), stored[0]
    )
    wanted: base.Wanted = {
        codes: (_kinds(scheme), (out, words(wide) if scheme.packed else wide)),
        "weight_scale": (base.SCALES, shape),
    }
    if not scheme.symmetric:
        zeros = (words(out), scales[1]) if scheme.packed else shape
        wanted["weight_zero_point"] = (("I32",) if scheme.packed else ("I8",), zeros)
    if scheme.ordered:
        wanted["weight_g_idx"] = (("I32", "I64"), (wide,))
    base.check(module, parts, wanted, str(scheme))

    def grid(name: str) -> Tensor:
        return dataclasses.replace(parts[name], shape=scales)

    fields = lambda name, axis: base.fields(parts[name], scheme.bits, axis)
    half = 2 ** (scheme.bits - 1) if scheme.packed else 0
    zero: base.Reader | float = float(half)
    if not scheme.symmetric:  # if packed, they are stored plus 2^(bits - 1), like the numbers
        zero = fields("weight_zero_point", 0) if scheme.packed else base.plain(grid("weight_zero_point"))
    made = base.Scaled(
        module, parts[codes].file, (out, wide), fields(codes, 1) if scheme.packed else base.plain(parts[codes]),
        base.plain(grid("weight_scale")), zero, tall_block,
        base.in_order(parts["weight_g_idx"], scales[1], wide_block) if scheme.ordered else wide_block,
        (base.integers(scheme.bits) if scheme.packed else base.kind_of(parts[codes]), base.kind_of(grid("weight_scale"))), half,
    )  # fmt: skip
    return base.replaced(module, parts, (*wanted, *(("weight_shape",) if scheme.packed else ())), made.tensor())


def _shape(module: str, parts: Parts, scheme: Scheme) -> tuple[int, int]:
    """The weight's `[out, in]`."""
    if not scheme.packed:
        return base.matrix(module, parts, "weight", _kinds(scheme))
    own = parts.get("weight_shape")
    if own is None or own.dtype not in ("I32", "I64") or own.shape != (2,):
        raise ModelError(f"the weights do not fit config.json ({scheme}): {module}.weight_shape is not two integers")
    out, wide = map(int, base.part(own, (0, 2)))
    if not (is_size(out) and is_size(wide)):
        raise ModelError(f"{module}.weight_shape says {[out, wide]}, which is not a matrix")
    return out, wide


def _kinds(scheme: Scheme) -> tuple[str, ...]:
    """The type of the stored numbers."""
    return ("I32",) if scheme.packed else ("I8",) if scheme.integer else ("F8_E4M3",)


COMPRESSED_TENSORS = Format(
    read,
    "`pack-quantized` (1 to 8 bits, with zero points and `g_idx` too), `int-quantized`, `float-quantized` and "
    "`naive-quantized`, of int8 and e4m3, `nvfp4-pack-quantized` and `mxfp4-pack-quantized`; scales for all, a row, groups or "
    "blocks; `targets` and `ignore` by name or `re:`, `Linear`",
    "other formats, sparse weights, transforms",
)
