"""From a line of text to a way to decode.

`beam:num_beams=4,length_penalty=0.8` names one. A drafter's name means speculative decoding with it, an unmask policy's
diffusion with it, a mixer's soft thinking with it; fields of that way stand among the method's own, `eagle3:verifier=typical`.
"""

import dataclasses
from typing import Any

from specjax import decode, search
from specjax.about import abouts
from specjax.assembly import line
from specjax.assembly.registry import DRAFTERS, MIXERS, SAMPLERS, UNMASKS, Entry, listed, parse
from specjax.decode.diffusion import Diffusion
from specjax.decode.soft_thinking import SoftThinking
from specjax.decode.speculate import Speculate
from specjax.decoder import Decode

DECODES = listed(Decode, decode, search)
"""The ways, by their names."""
_MEANT: dict[str, tuple[type[Decode], str, dict[str, Entry]]] = {
    "drafter": (Speculate, "drafter", DRAFTERS),
    "policy": (Diffusion, "unmask", {**UNMASKS, **SAMPLERS}),
    "mixer": (SoftThinking, "mixer", MIXERS),
}
"""What a method's name means: the way, its field for the method, and the methods."""


def read_decode(text: str) -> Decode:
    """The way that a line, or an object of JSON, says.

    >>> read_decode("beam:num_beams=4,length_penalty=0.8")
    Beam(processors=(), num_beams=4, num_beam_groups=1, diversity_penalty=0.0, length_penalty=0.8, early_stopping=False)
    >>> read_decode("prompt_lookup:length=8,verifier=(typical:epsilon=0.2)").verifier
    'typical:epsilon=0.2'

    Raises:
      ValueError: on an unknown name or field, naming those there are.
    """
    text = line.of_json(text)
    first = line.read_line(line.parts(text)[0], "decode").name
    for way, field, table in _MEANT.values():
        if first in table:
            return _method(way, field, text)
    if first not in DECODES:
        raise ValueError(
            f"unknown way to decode {first!r}; choose {', '.join(DECODES)}, a drafter (see `specjax drafters`) or a policy of "
            f"a "
            "diffusion model (see `specjax policies`)"
        )
    return parse("decode", DECODES, text)


def _method(way: type[Decode], field: str, text: str) -> Decode:
    """A way with the method that a line names; what is the way's own is taken out of the line."""
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
    """What a user asks for by `decode` and `drafter`; None where he leaves it open.

    Args:
      decode: a way, or its line.
      drafter: a line of a drafter, a drafter, or a pair of a drafter and its parameters.
      model: for errors.

    Raises:
      ValueError: where both are given, or one of them is of another kind.
    """
    if decode is not None and drafter is not None:
        raise ValueError(
            "a drafter is a way to decode, and decode names one too: leave drafter out, or give it alone (as in "
            "decode='eagle3:verifier=typical')"
        )
    if isinstance(drafter, str):
        made = read_decode(drafter or "none")
        if not isinstance(made, Speculate):
            raise ValueError(f"{drafter!r} is no drafter, see `specjax drafters`: give it as decode")
        return made
    if drafter is not None:
        return Speculate(drafter)
    if decode is None or isinstance(decode, Decode):
        return decode
    if not isinstance(decode, str):
        raise ValueError(f"decode is a way to decode (specjax.decode) or its line of text, not {decode!r:.60}")
    return read_decode(decode)


def usual_decode(model: Any) -> Decode:
    """The way of a model where nobody names one."""
    return Diffusion() if model.masked or model.canvas else Speculate()
