"""How texts are cut into pieces before byte-pair merges, by the names in GGUF files (`tokenizer.ggml.pre`).

Regular expressions are applied one after another, each to the pieces of the previous one. Every match and every gap is
a piece. The expressions come from github.com/ggml-org/llama.cpp, src/llama-vocab.cpp, in the syntax of the `tokenizers`
package.
"""

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _modern(digits: str, letters: str = r"\p{L}") -> str:
    """The expression of models since GPT-4: contractions, words with a preceding sign, some digits, signs, line ends,
    spaces."""
    words, signs = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+", rf" ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*"
    return rf"{_CONTRACTIONS}|{words}|\p{{N}}{digits}|{signs}|{_SPACES}"


def _cased(digits: str, suffix: str) -> str:
    """The expression of models since GPT-4o: words end where lower-case letters are followed by capitals."""
    head, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = rf"{head}{upper}*{lower}+{suffix}|{head}{upper}+{lower}*{suffix}"
    return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SIGNS = r"[\p{P}\$\+<=>\^~\|`]+"
_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 smaug-bpe dbrx glm4 chatglm-bpe",
        (_modern("{1,3}"),),
    ),
    ("qwen2 deepseek-r1-qwen megrez stablelm2", (_modern(""),)),
    ("qwen35", (_modern("", r"[\p{L}\p{M}]"),)),
    ("gpt-2 phi-2 mpt olmo jais exaone4 granite-docling modern-bert", (_GPT2,)),
    ("smollm starcoder refact command-r codeshell exaone", (r"\p{N}", _GPT2)),
    ("gpt-4o llama4 kanana2", (_cased("{1,3}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),)),
    ("tekken", (_cased("", ""),)),
    ("falcon", (_SIGNS, _GPT2, "[0-9][0-9][0-9]")),
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
)
SPLITS = {name: patterns for names, patterns in _NAMES for name in names.split()}
"""The expressions by name."""
WHOLE = frozenset("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4 tekken".split())
"""Names for which a piece that is a token becomes that token, whatever its merges would give."""
BEGIN = frozenset("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split())
"""Names for which texts begin with the BOS token by default."""
