"""From a line of text to a way to decode.

`beam:num_beams=4,length_penalty=0.8` names one. Other names imply a way: a drafter's speculative decoding, an unmask
policy's diffusion, a mixer's soft thinking. Fields of that way stand among the method's own: `eagle3:verifier=typical`.
"""

import dataclasses
from typing import Any, TypeVar

from specjax import decode, search
from specjax.about import abouts
from specjax.assembly import line
from specjax.assembly.registry import DRAFTERS, MIXERS, SAMPLERS, UNMASKS, Entry, listed, parse
from specjax.decode.any_order import AnyOrder
from specjax.decode.diffusion import Diffusion
from specjax.decode.soft_thinking import SoftThinking
from specjax.decode.speculate import Speculate
from specjax.decoder import Decode

Way = TypeVar("Way", bound=Decode)

DECODES = listed(Decode, decode, search)
"""The ways, by their names."""
_MEANT: dict[str, tuple[type[Decode], str, dict[str, Entry]]] = {
    "drafter": (Speculate, "drafter", DRAFTERS),
    "policy": (Diffusion, "unmask", {**UNMASKS, **SAMPLERS}),
    "mixer": (SoftThinking, "mixer", MIXERS),
}
"""What a method's name implies: the way, its field for the method, and the methods."""


def read_decode(text: str) -> Decode:
    """The way that a line, or a JSON object, describes.

    >>> read_decode("beam:num_beams=4,length_penalty=0.8")
    Beam(processors=(), num_beams=4, num_beam_groups=1, diversity_penalty=0.0, length_penalty=0.8, early_stopping=False)
    >>> read_decode("prompt_lookup:length=8,verifier=(typical:epsilon=0.2)").verifier
    'typical:epsilon=0.2'

    Raises:
      ValueError: for an unknown name or field; it lists the known ones.
    """
    text = line.of_json(text)
    first = _first(text)
    for way, field, table in _MEANT.values():
        if first in table:
            return _method(way, field, text)
    if first not in DECODES:
        raise ValueError(
            f"unknown way to decode {first!r}; choose {', '.join(DECODES)}, a drafter (see `specjax drafters`) or a policy of "
            "a diffusion model (see `specjax policies`)"
        )
    return parse("decode", DECODES, text)


def _first(text: str) -> str:
    """The name that a line begins with."""
    return line.read_line(line.parts(line.of_json(text))[0], "decode").name


def _method(way: type[Way], field: str, text: str) -> Way:
    """A way with the method that a line names; the way's own fields are taken out of the line."""
    known = DECODES[abouts(way)[0].name]
    own, methods = {}, []
    for part in line.parts(text):
        asked = line.read_line(part, "decode")
        of_way = {name: value for name, value in asked.fields.items() if name in known.fields and name != field}
        own |= of_way
        rest = {name: value for name, value in asked.fields.items() if name not in of_way}
        methods.append(line.line_of({"name": asked.name, **rest}))
    settings = line.line_of({"name": "way", **own})
    made = parse("decode", {"way": known}, settings)
    return dataclasses.replace(made, **{field: "+".join(methods)})


def decode_of(decode: "str | Decode | None", drafter: Any, model: Any = None) -> Decode | None:
    """The way that a user asks for by `decode` and `drafter`; None if both are left open.

    Args:
      decode: a way, or its line.
      drafter: a line of a drafter, a drafter, or a pair of a drafter and its parameters.
      model: for errors.

    Raises:
      ValueError: if both are given, or one of them is of another kind.
    """
    if decode is not None and drafter is not None:
        raise ValueError(
            "a drafter is a way to decode, and decode names one too: leave drafter out, or give it alone (as in "
            "decode='eagle3:verifier=typical')"
        )
    if isinstance(drafter, str):
        return read_drafter(drafter or "none")
    if drafter is not None:
        return Speculate(drafter)
    if decode is None or isinstance(decode, Decode):
        return decode
    if not isinstance(decode, str):
        raise ValueError(f"decode is a way to decode (specjax.decode) or its line of text, not {decode!r:.60}")
    return read_decode(decode)


def read_drafter(text: str) -> Speculate:
    """Speculative decoding with the drafter that a line, or a JSON object, describes.

    Raises:
      ValueError: if it describes none.
    """
    name = _first(text)
    if name in DRAFTERS:
        return _method(Speculate, "drafter", line.of_json(text))
    if name in DECODES or any(name in table for _, _, table in _MEANT.values()):
        raise ValueError(f"{text!r} is not a drafter, see `specjax drafters`: give it as decode")
    raise ValueError(f"unknown drafter {name!r}; choose {', '.join(DRAFTERS)}")


def usual_decode(model: Any) -> Decode:
    """The way for a model if nobody names one."""
    if model.any_subset:
        return AnyOrder()
    return Diffusion() if model.masked else Speculate()
