"""Weights of a circuit that finds a key in a text: what the training of `tiny-keys` begins with, under noise.

The first layer rotates. Its heads look exactly one to five tokens back, and tell what stood there: an owner's code, or the word
"is". The second layer sees all, without positions. A digit is found by three things: it is a digit, the owner stood within
five tokens before it, and "is" stood as far before it as the query's place in the answer asks. All other words of an answer
follow from the token before, and the owner from the question. The other layers, the MLPs and half of the channels are
noise alone.

Residual stream: each of `PLACES` is a range of channels.
"""

import functools

import numpy as np

from experiments.long_context.text import OWNERS, Writer

Weights = dict[str, np.ndarray]

WIDTH, INNER, LAYERS = 128, 256, 4
HEADS, KV_HEADS, HEAD = 6, 2, 32
LOOKS = 5
"""How far the first layer looks back; the sixth head looks nowhere."""
THETA = 10000.0
WORDS = ("is", "?", "The", "key", "of", ".")
"""The words of an answer, besides an owner and digits."""
PLACES = {
    "one": slice(0, 1), "owner": slice(1, 17), "digit": slice(17, 27), "word": slice(27, 33), "is_owner": slice(33, 34),
    "owner_before": slice(34, 50), "is_before": slice(50, 54), "found": slice(54, 64),
}  # fmt: skip
LOUD = 4.0
"""The constant of every token: it dominates the norms, so that these nearly are one factor."""
FREE = slice(64, WIDTH)
"""Channels that the circuit does not use."""
NOISE = 0.5
"""Of a matrix, beside what keeps the size of its inputs; a tenth of it where it writes to the residual stream."""
_SHAPES = {
    "q": (HEADS * HEAD, WIDTH),
    "k": (KV_HEADS * HEAD, WIDTH),
    "v": (KV_HEADS * HEAD, WIDTH),
    "o": (WIDTH, HEADS * HEAD),
}
SHARP, OWNER, PLACE, DIGIT = 12.0, 24.0, 18.0, 36.0
"""How much an exact distance, the right owner, the right place and being a digit add to a score."""


@functools.cache
def codes(count: int, size: int, steps: int = 3000) -> np.ndarray:
    """Unit vectors `[count, size]` no two of which are near each other, found by pushing each from its nearest ones."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, size))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    for i in range(steps):
        near = x @ x.T
        np.fill_diagonal(near, -1)
        push = np.exp(20 * (near - near.max(1, keepdims=True)))
        x = x - 0.1 * (1 - i / steps) * (push / push.sum(1, keepdims=True)) @ x
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x


def embedding(writer: Writer, size: int) -> np.ndarray:
    """`[V, E]`: what each token is."""
    table = np.zeros((size, WIDTH))
    table[:, PLACES["one"]] = LOUD
    token = lambda word: writer.ids(f" {word}")[-1]
    owners = [token(owner) for owner in OWNERS]
    table[owners, PLACES["owner"]] = codes(len(OWNERS), 16)
    table[owners, PLACES["is_owner"]] = 1.0
    for i, word in enumerate(WORDS):
        table[token(word), PLACES["word"].start + i] = 1.0
    for digit in range(10):
        for spelled in writer.digit(digit):
            table[spelled, PLACES["digit"].start + digit] = 1.0
    return table


def head(writer: Writer, size: int) -> np.ndarray:
    """`[V, E]`: what follows."""
    table = np.zeros((size, WIDTH))
    token = lambda word: writer.ids(f" {word}")[-1]
    word = lambda name: PLACES["word"].start + WORDS.index(name)
    table[token("The"), word("?")] = table[token("key"), word("The")] = table[token("of"), word("key")] = 8.0
    table[token("is"), PLACES["is_owner"]] = 8.0
    table[writer.end, word(".")] = 8.0
    for owner, code in zip(OWNERS, codes(len(OWNERS), 16), strict=True):
        table[token(owner), PLACES["owner_before"]] = 8.0 * code
        table[token(owner), word("of")] = 8.0
        table[token(owner), PLACES["one"]] = -2.0
    for digit in range(10):
        first, later = writer.digit(digit)
        # the first digit has a space before it, and stands after "is"
        for spelled, sign in ((first, 1.0), (later, -1.0)):
            table[spelled, PLACES["found"].start + digit] = 8.0
            table[spelled, word("is")] = 8.0 * sign
            table[spelled, PLACES["is_before"].start : PLACES["is_before"].start + 3] = -8.0 * sign
            table[spelled, PLACES["one"]] = -2.0
    table[token("."), PLACES["is_before"].stop - 1] = 24.0
    return table


def _products(query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray) -> Weights:
    """A layer's attention, from matrices `[heads, in, out]` of what is normed; torch has the outputs first."""
    flat = lambda x: np.concatenate(list(x), axis=1).T
    names = "q_proj", "k_proj", "v_proj"
    made = {f"self_attn.{name}.weight": flat(x) for name, x in zip(names, (query, key, value), strict=True)}
    return made | {"self_attn.o_proj.weight": np.concatenate(list(out), axis=0).T}


def looking_back() -> Weights:
    """The first layer. The score of a token d back, for a head that looks k back, is a sum of cosines of (d - k) times rope's
    rates, which is largest at d = k by far."""
    scale, rates = _normed(LOUD**2 + 1), THETA ** -(np.arange(HEAD // 2) / (HEAD // 2))
    query, key = np.zeros((HEADS, WIDTH, HEAD)), np.zeros((KV_HEADS, WIDTH, HEAD))
    value, out = np.zeros((KV_HEADS, WIDTH, HEAD)), np.zeros((HEADS, HEAD, WIDTH))
    loud = np.sqrt(SHARP * np.sqrt(HEAD)) / (scale * LOUD)
    key[:, 0, : HEAD // 2] = loud
    value[:, PLACES["owner"], :16] = np.eye(16) / scale
    value[:, PLACES["word"].start + WORDS.index("is"), 16] = 1 / scale
    for h in range(LOOKS):
        back = -(h + 1) * rates
        query[h, 0] = loud * np.concatenate([np.cos(back), np.sin(back)])
        out[h, :16, PLACES["owner_before"]] = np.eye(16)
        if h < 4:
            out[h, 16, PLACES["is_before"].start + h] = 1.0
    return _products(query, key, value, out)


def finding() -> Weights:
    """The second layer, of which one head does something."""
    scale = _normed(LOUD**2 + 3)
    strength = lambda score: np.sqrt(score * np.sqrt(HEAD)) / scale
    query, key = np.zeros((HEADS, WIDTH, HEAD)), np.zeros((KV_HEADS, WIDTH, HEAD))
    value, out = np.zeros((KV_HEADS, WIDTH, HEAD)), np.zeros((HEADS, HEAD, WIDTH))
    query[0, PLACES["owner_before"], :16] = key[0, PLACES["owner_before"], :16] = strength(OWNER) * np.eye(16)
    first = PLACES["is_before"].start
    query[0, PLACES["word"].start + WORDS.index("is"), 16] = strength(PLACE)
    query[0, first : first + 3, 17:20] = strength(PLACE) * np.eye(3)
    key[0, first : first + 4, 16:20] = strength(PLACE) * np.eye(4)
    query[0, 0, 20], key[0, PLACES["digit"], 20] = strength(DIGIT) / LOUD, strength(DIGIT)
    value[0, PLACES["digit"], :10] = np.eye(10) / scale
    out[0, :10, PLACES["found"]] = np.eye(10)
    return _products(query, key, value, out)


def _normed(square: float) -> float:
    """The factor of a norm, for a token whose channels have this sum of squares."""
    return float(np.sqrt(WIDTH / square))


def weights(writer: Writer, noise: float = NOISE) -> Weights:
    """All tensors of the folder by name, in float32: the circuit, and noise on all of it."""
    size = writer.tokenizer.get_vocab_size()
    draw = np.random.default_rng(0)
    made = {"model.embed_tokens.weight": embedding(writer, size), "lm_head.weight": head(writer, size)}
    made["model.embed_tokens.weight"][:, FREE] = noise / 4 * draw.standard_normal((size, WIDTH - FREE.start))
    silent = {f"self_attn.{name}_proj.weight": np.zeros(shape) for name, shape in _SHAPES.items()}
    for i in range(LAYERS):
        own = (looking_back, finding)[i]() if i < 2 else silent
        own = own | {f"mlp.{name}_proj.weight": np.zeros((INNER, WIDTH)) for name in ("gate", "up")}
        own["mlp.down_proj.weight"] = np.zeros((WIDTH, INNER))
        made |= {f"model.layers.{i}.{name}": x for name, x in own.items()}
    for name, x in made.items():
        loud = noise * (0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        made[name] = x + loud * draw.standard_normal(x.shape) * (x.shape[1] ** -0.5)
    made["model.norm.weight"] = np.ones(WIDTH)
    made |= {
        f"model.layers.{i}.{name}_layernorm.weight": np.ones(WIDTH)
        for i in range(LAYERS)
        for name in ("input", "post_attention")
    }
    return {name: np.ascontiguousarray(x, np.float32) for name, x in made.items()}
