"""The strings of a JSON Schema as expressions: formats, lengths and strings that differ from some."""

from collections.abc import Iterable

from specjax.constrain.pattern import CHARACTER, PLAIN

STRING = f'"{CHARACTER}*"'
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31))"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_LABEL = "[a-z](?:[a-z0-9]{0,20}|[a-z0-9](?:-[a-z0-9]{1,8}){1,2})"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{1,3}}"
_SIGNS = "[A-Za-z0-9._~!$&'()*+,;=:@-]"
_PATH = f"(?:/{_SIGNS}*)*"
_END = rf"(?:\?(?:{_SIGNS}|[/?])*)?(?:#(?:{_SIGNS}|[/?])*)?"
_URI = f"https?://{_HOST}(?::[1-9][0-9]{{0,3}})?{_PATH}{_END}"
_REFERENCE = f"(?:{_URI}|(?:/?[A-Za-z0-9._~!$&'()*+,;=@-]+{_PATH})?{_END})"
_EMAIL = r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*@[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*(?:\.[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*)+"
_H = "[0-9a-f]{1,4}"
_POINTER = "(?:/(?:[A-Za-z0-9._-]|~[01])*)*"
_TIMES = "T(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S)"
_DAYS = "(?:[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,4}D)"
FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "ipv4": _IPV4,
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": _EMAIL,
    "hostname": _HOST, "uri": _URI, "iri": _URI, "uri-template": _URI,
    "uri-reference": _REFERENCE, "iri-reference": _REFERENCE, "idn-hostname": _HOST, "idn-email": _EMAIL,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,3}})(?:#|{_POINTER})",
    "ipv6": f"(?:{_H}(?::{_H}){{7}}|::(?:{_H}(?::{_H}){{0,5}})?|{_H}::(?:{_H}(?::{_H}){{0,4}})?)",
    "duration": f"P(?:{_DAYS}(?:{_TIMES})?|{_TIMES}|[0-9]{{1,4}}W)", "json-pointer": _POINTER,
    "regex": r"\^?(?:[A-Za-z0-9_ @:,/-]|\[[a-z0-9]{1,8}\][*+?]?|[A-Za-z0-9][*+?])*\$?",
}  # fmt: skip
"""The formats of the draft, by expressions that hold some of their texts: a 29th of February is never written, and of URIs only
those of the web. Formats of other names are remarks, of which a text need not take account.
"""


def differing(names: Iterable[str]) -> str:
    """What stands between the quotes of a string that is none of some, without escapes."""
    return _differing({name for name in names if not set(name) & {'"', "\\"} and not any(sign < " " for sign in name)})


def _differing(rests: set[str]) -> str:
    """Any text but some, sign by sign."""
    if not rests:
        return f"{PLAIN}*"
    after: dict[str, set[str]] = {}
    for rest in rests - {""}:
        after.setdefault(rest[0], set()).add(rest[1:])
    ways = [f"\\x{{{ord(sign):x}}}{_differing(own)}" for sign, own in sorted(after.items())]
    ways.append("".join([PLAIN[:-1], *(f"\\x{{{ord(sign):x}}}" for sign in sorted(after)), "]", PLAIN, "*"]))
    return f"(?:{'|'.join(ways)}){'' if '' in rests else '?'}"
