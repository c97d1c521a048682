"""GAD: steps and texts against the published loop, drafts against whole passes, and what its training reads and learns."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.conformance import MODELS, drawn
from support.shapes import changed
from support.source_lm import KINDS, Reads, reads_params

import specjax
from specjax import cli, models
from specjax import decoder as decoding
from specjax.assembly import registry
from specjax.draft import Gad
from specjax.draft.gad.objective import TrainGad, chosen
from specjax.draft.model import ModelDraft
from specjax.expand import Chain
from specjax.lm import BaseLM, Block, Output, Source, Wants
from specjax.models import hf_config
from specjax.objectives.base import Batch
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.train.gad import gad_task
from specjax.train.options import TrainOptions
from specjax.verify import GadPlus

V, K, ROWS, NEW, CAPACITY = 24, 6, 4, 20, 40
START, MASK = 2, 23
SOURCES = ((5, 6, 7, 8), (9, 3), (4, 4, 11, 12, 13), (20,))
TARGET = Reads(V, copies=0.0)


@dataclasses.dataclass(frozen=True)
class Places(BaseLM):
    """A block drafter that is a table: the token of a mask depends on the source and the place."""

    vocab_size: int = V
    encodes = True

    def init_cache(self, batch, capacity, dtype=None):
        return {"kind": jnp.zeros((batch,), jnp.int32), "text": jnp.zeros((batch, capacity), jnp.float32)}

    def encode(self, params, cache, source):
        return {**cache, "kind": source.inputs[:, 0]}

    def commit(self, cache, delta, src, dst, counts=None):
        return {**cache, "text": super().commit(cache["text"], delta, src, dst, counts)}

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        final = jax.nn.one_hot(params["says"][cache["kind"][:, None], block.positions], V)
        return Output(block.tokens.astype(jnp.float32), final=final if wants.final else None)

    def unembed(self, params, h):
        return h


def started(lm, drafter, verifier, params):
    """A decoder and greedy rows that have read their sources."""
    decoder = specjax.speculative(lm, drafter, verifier)
    many = lambda number: jnp.full((ROWS,), number, jnp.int32)
    prompts = Prompts(
        jnp.full((ROWS, 1), START), many(1), row_keys(0, "abcd"), many(1 + NEW), SamplingArrays.make(ROWS, temperature=0.0),
        source=jax.tree.map(jnp.asarray, Source.of(SOURCES, 8)),
    )  # fmt: skip
    return decoder, decoder.init(params, prompts, capacity=CAPACITY)


@functools.cache
def logits_after(row, text):
    """The target's logits after a text: what its tables say of the last token, the source and the place."""
    tables = {name: np.asarray(table) for name, table in reads_params(lm=TARGET).items()}
    kind = sum((token + 1) * (at + 1) for at, token in enumerate(SOURCES[row])) % KINDS
    return tables["last"][text[-1]] + tables["kind"][kind] + tables["place"][(len(text) - 1) % 4]


def published(row, says, beta, tau):
    """The authors' loop for one source: the text after every step. `says` `[L]` are the drafter's tokens by place."""
    text, sizes = (START,), []
    while len(text) - 1 < NEW:
        for token in says[len(text) : len(text) + K]:
            logits = logits_after(row, text)
            order = np.argsort(-logits, kind="stable")[:beta]
            if token not in {int(one) for one in order if logits[order[0]] - logits[one] <= tau}:
                break
            text = (*text, int(token))
        text = (*text, int(np.argmax(logits_after(row, text))))[: 1 + NEW]
        sizes.append(len(text))
    return list(text), sizes


def says(share):
    """What the drafter says of every source's places: the target's text, or another token at a share of the places."""
    rng = np.random.default_rng(0)
    table = rng.integers(0, V - 1, (V, CAPACITY + K))
    for row, source in enumerate(SOURCES):
        text = published(row, [-1] * CAPACITY, 1, 0.0)[0]
        table[source[0], : len(text)] = np.where(rng.random(len(text)) < share, table[source[0], : len(text)], text)
    return table


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "tau"), [(1, 0.0), (5, 3.0)])
def test_steps_and_texts_are_those_of_the_published_loop(beta, tau):
    table = says(0.25)
    params = {"target": reads_params(lm=TARGET), "draft": {"says": jnp.asarray(table)}}
    drafter, verifier = Gad(Places(), MASK, Chain(K)), None if beta == 1 else GadPlus(beta, tau)
    decoder, state = started(TARGET, drafter, verifier, params)
    wanted = [published(row, table[source[0]], beta, tau) for row, source in enumerate(SOURCES)]
    kept = []
    for step in range(4):
        state = decoding.run(decoder, params, state, 1)
        sizes = [sizes[min(step, len(sizes) - 1)] for _, sizes in wanted]
        assert state.length.tolist() == sizes
        for row, (text, _) in enumerate(wanted):
            assert state.tokens[row, : sizes[row]].tolist() == text[: sizes[row]]
        kept += sizes
    assert len({*kept}) > 6  # drafts of several lengths were kept
    plain = [published(row, [-1] * CAPACITY, 1, 0.0)[0] for row in range(ROWS)]
    assert ([text for text, _ in wanted] == plain) == (beta == 1)


@functools.cache
def small():
    """A model with an encoder, and random weights, sharpened so that its text has structure."""
    config = changed(MODELS["encoder"].config, num_hidden_layers=1, vocab_size=V)
    encoder = dataclasses.replace(config.encoder, layers=config.encoder.layers[:1])
    lm = models.LlamaLM(dataclasses.replace(config, encoder=encoder))
    own = jax.tree.map(lambda x: jnp.asarray(2 * x), drawn(jax.jit(lm.init)(jax.random.key(7))))
    return lm, {"target": own, "draft": jax.tree.map(lambda x: 1.1 * x, own)}


@functools.partial(jax.jit, static_argnums=0)
def whole(lm, params, state, source):
    """The likeliest tokens `[B, K]` of K masks after every row's text, by one pass without a cache."""
    rows, width = state.tokens.shape
    slots, size = jnp.arange(width)[None], state.length[:, None]
    cache = lm.encode(params, lm.init_cache(rows, CAPACITY), source)
    block = Block(
        jnp.where(slots < size, state.tokens, MASK), jnp.broadcast_to(slots, (rows, width)), jnp.zeros(rows, jnp.int32),
        (slots < size + K)[:, None], causal=False,
    )  # fmt: skip
    logits = lm(params, block, cache, wants=Wants(logits=True)).logits.at[:, :, MASK].set(-jnp.inf)
    return jnp.take_along_axis(jnp.argmax(logits, axis=2), size + jnp.arange(K)[None], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def drafted(decoder, params, state):
    view = specjax.draft.View(state.tokens, state.length, ~state.done, state.cache, max_depth=decoder.drafter.depth)
    sampler = specjax.sampling.Sampler(state.key, state.tokens, state.length, ~state.done, state.sampling)
    return decoder.drafter.propose(params, state.draft, view, sampler).tree.tokens[:, 1:]


@dataclasses.dataclass(frozen=True)
class Sums(Places):
    """A block drafter whose tokens depend on every token that a mask sees, and on its place."""

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        own = block.tokens * (block.positions + 1.0)
        before = jnp.arange(cache["text"].shape[1])[None] < block.length[:, None]
        seen = jnp.einsum("bts,bs->bt", block.visible, own) + jnp.where(before, cache["text"], 0).sum(axis=1)[:, None]
        return Output(own, final=jax.nn.one_hot((seen.astype(int) + 7 * block.positions) % MASK, V))


def test_a_mask_sees_the_whole_text_and_every_mask():
    """Tokens that the drafter has read, those that it has not, and the masks, each once and at its own place."""
    tokens = np.random.default_rng(0).integers(0, MASK, (3, 12))
    length, old = np.asarray([9, 6, 8]), np.asarray([7, 3, 8])
    drafter, slots = Gad(Sums(), MASK, Chain(K), recent=3), np.arange(12)
    cache = drafter.lm.init_cache(3, CAPACITY)
    read = np.where(slots < old[:, None], tokens * (slots + 1), 0)
    cache = {**cache, "text": cache["text"].at[:, :12].set(read)}
    text, size, live = jnp.asarray(tokens), jnp.asarray(length), jnp.ones(3, bool)
    view = specjax.draft.View(text, size, live, {}, max_depth=K)
    sampler = specjax.sampling.Sampler(row_keys(0, "abc"), text, size, live, SamplingArrays.make(3, temperature=0.0))
    made = jax.jit(drafter.propose)({"draft": {}}, ModelDraft(cache, jnp.asarray(old)), view, sampler)
    for row, end in enumerate(length):
        places = end + np.arange(K)
        seen = (tokens[row, :end] * (slots[:end] + 1)).sum() + (MASK * (places + 1)).sum()
        assert made.tree.tokens[row, 1:].tolist() == ((seen + 7 * places) % MASK).tolist()
        assert made.draft.cache["text"][row, :end].tolist() == (tokens[row, :end] * (slots[:end] + 1)).tolist()


@pytest.mark.slow
def test_drafts_are_those_of_whole_passes():
    """At several lengths of the text, all of which is read again."""
    (lm, params), source = small(), jax.tree.map(jnp.asarray, Source.of(SOURCES, 8))
    decoder, state = started(lm, Gad(lm, MASK, Chain(K), recent=CAPACITY), None, params)
    for _ in range(5):
        np.testing.assert_array_equal(drafted(decoder, params, state), whole(lm, params["draft"], state, source))
        state = decoding.run(decoder, params, state, 2)


TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, V - 1, (3, 16)))
BATCH = Batch(TOKENS, jnp.asarray([[0] * 4 + [1] * 6 + [0] * 6, [0] * 8 + [1] * 8, [0] * 2 + [1] + [0] * 13], bool))
OBJECTIVE = TrainGad(TARGET, TARGET, starts=(START,), mask=MASK, block=4)


@pytest.mark.slow
def test_what_a_pass_reads():
    """A beginning of r tokens and four masks after it, of which those after the text's end are not learned."""
    source = OBJECTIVE.source(BATCH)
    assert source.lengths.tolist() == [4, 8, 2] and source.inputs[0].tolist() == [*TOKENS[0, :4].tolist(), *[-1] * 12]
    for drawn_at, begun in ((0.0, (5, 7, 0)), (0.5, (2, 3, 0)), (0.99, (0, 0, 0))):
        blocks = OBJECTIVE.blocks(BATCH, jnp.full((3,), drawn_at))
        for row, (first, size) in enumerate(((4, 6), (8, 8), (2, 1))):
            r = begun[row]
            assert blocks.tokens[row, : 1 + size].tolist() == [START, *TOKENS[row, first : first + size].tolist()]
            assert np.flatnonzero(blocks.masked[row]).tolist() == [*range(1 + r, 5 + r)]
            assert np.flatnonzero(blocks.seen[row]).tolist() == [*range(5 + r)]
            assert np.flatnonzero(blocks.due[row]).tolist() == [*range(1 + r, 1 + min(size, r + 4))]


@pytest.mark.slow
def test_glances_are_among_the_masks():
    places = jnp.asarray([[0, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 1]], bool)
    got = chosen(places, jnp.asarray([[0.0, 0.9, 0.2, 0.5, 0.1, 0.0], [0.3, 0, 0, 0, 0, 0.2]]), jnp.asarray([2.0, 0.0]))
    assert got.tolist() == [[False, False, True, False, True, False], [False] * 6]


@dataclasses.dataclass(frozen=True)
class Table:
    """A model whose features, which are its logits, are its parameters `[B, W, V]`; it keeps what it was shown."""

    shown: list = dataclasses.field(default_factory=list, hash=False, compare=False)

    def init_cache(self, batch, capacity):
        return {}

    def encode(self, params, cache, source):
        return cache

    def __call__(self, params, block, cache, *, wants):
        self.shown.append(block)
        return Output(None, final=params)

    def unembed(self, params, h):
        return h


@pytest.mark.slow
def test_the_loss_is_that_of_masks_that_show_nothing():
    """Against the definition: a share of the wrong ones shows tokens, the others have smoothed labels."""
    made = Table()
    objective = dataclasses.replace(OBJECTIVE, draft=made, most=0.5, least=0.5)
    logits = 2 * jax.random.normal(jax.random.key(0), (3, 21, V))
    value, metrics = objective.loss(logits, None, BATCH, jax.random.key(4))
    first, second = (np.asarray(block.tokens) for block in made.shown)
    assert not made.shown[0].causal
    logs, losses, count, hits = np.asarray(jax.nn.log_softmax(logits)), [], 0, 0
    for row, (begin, size) in enumerate(((4, 6), (8, 8), (2, 1))):
        text = [START, *TOKENS[row, begin : begin + size].tolist()]
        masked = np.flatnonzero(first[row] == MASK)
        due = [at for at in masked if at < len(text)]
        assert masked.tolist() == [*range(masked[0], masked[0] + 4)] and due
        right = [int(np.argmax(logits[row, at])) == text[at] for at in due]
        open_ = [at for at in due if second[row, at] == MASK]
        assert len(due) - len(open_) == (len(due) - sum(right)) // 2
        assert all(second[row, at] == text[at] for at in due if at not in open_)
        losses += [-0.9 * logs[row, at, text[at]] - 0.1 * logs[row, at].mean() for at in open_]
        count, hits = count + len(due), hits + sum(right)
    np.testing.assert_allclose(value, np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], hits / count, rtol=1e-5)
    assert metrics["weight"] == len(losses)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with an encoder, one without, and the texts that the first one writes of some sources."""
    home = tmp_path_factory.mktemp("gad")
    config = {
        "model_type": "mbart", "vocab_size": V, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "max_position_embeddings": 64, "decoder_start_token_id": START,
    }  # fmt: skip
    lm = models.LlamaLM(hf_config.from_hf(config))
    own = jax.tree.map(lambda x: x * 3 if x.ndim == 2 else x, jax.jit(lm.init)(jax.random.key(1)))
    models.save(home / "target", lm, own, generation={"decoder_start_token_id": START})
    models.save(home / "plain", tiny.TARGET, tiny.target_params())
    target = models.load(home / "target", dtype="float32")
    sources = np.random.default_rng(0).integers(3, V, (12, 5)).tolist()
    found = specjax.generate(target, sources, temperature=0, max_new_tokens=12, batch_size=12, progress=False)
    lines = [
        json.dumps({"prompt": source, "tokens": list(one.tokens)}) for source, one in zip(sources, found, strict=True)
    ]
    (home / "data.jsonl").write_text("\n".join(lines))
    return home


def test_weights_that_are_packed_cannot_be_trained():
    packed = SimpleNamespace(name="target", weights="int8")
    with pytest.raises(
        ValueError, match="gad trains target's own weights, and they are int8: .*, or start from --draft"
    ):
        gad_task(packed, TrainOptions(drafter="gad", output="out"), lambda: None)


@pytest.mark.slow
def test_the_command_makes_a_folder_that_drafts(folders, tmp_path, capsys):
    """It learns the texts, and without spare tokens its mask has a row of its own."""
    words = ["--data", folders / "data.jsonl", "--steps", 60, "--batch-size", 12, "--length", 20, "--warmup", 4]
    words += ["--learning-rate", "1e-2"]
    run = lambda line, target, out, *more: cli.main(
        [str(word) for word in ("train", line, *words, "--target", folders / target, "--output", tmp_path / out, *more)]
    )
    assert run("gad", "plain", "none") == 2
    assert "gad drafts for a target with an encoder, and" in capsys.readouterr().err
    assert run("pard", "target", "none", "--draft", folders / "target") == 2
    assert "have no sources for the encoder of target: train gad, or choose a target" in capsys.readouterr().err
    assert run("gad", "target", "none", "--start", "x") == 2 and "--start is not for gad" in capsys.readouterr().err
    assert run("gad:mask=99", "target", "none") == 2 and "gad: mask 99 is outside the 24" in capsys.readouterr().err
    assert run("gad", "target", "none", "--length", 8) == 2
    assert "tokens, and rows have 8: raise --length" in capsys.readouterr().err
    assert run("gad", "target", "none", "--length", 60) == 2
    assert "--length 60 and 26 for what is read beside a text are more than the draft's 64" in capsys.readouterr().err
    assert run("gad", "target", "none", "--weights", "int8") == 2
    assert "gad trains target's own weights, and they are int8: leave out --weights, or" in capsys.readouterr().err
    assert run("gad", "target", "none", "--draft", "tiny-diffusion") == 2
    assert "is a diffusion model: pick a model with an encoder" in capsys.readouterr().err
    assert run("gad:block=6", "target", "out") == 0
    target = models.load(folders / "target", dtype="float32")
    drafter, own = registry.build_drafter(f"gad:model={tmp_path / 'out'},length=6", target)
    assert (drafter.mask_id, drafter.lm.vocab_size, drafter.depth) == (V, V, 6)
    assert own["embed"]["embedding"].shape == (V + 1, 32)
    lines = [json.loads(line) for line in (folders / "data.jsonl").read_text().splitlines()]
    found = specjax.generate(
        target, [line["prompt"] for line in lines], decode=f"gad:model={tmp_path / 'out'},length=6", temperature=0,
        max_new_tokens=12, batch_size=12, progress=False,
    )  # fmt: skip
    assert [list(one.tokens) for one in found] == [line["tokens"] for line in lines]
    assert sum(one.steps for one in found) < 0.7 * sum(len(line["tokens"]) for line in lines)


@pytest.mark.slow
def test_what_a_folder_and_a_target_must_have(folders):
    target, plain = (models.load(folders / name, dtype="float32") for name in ("target", "plain"))
    with pytest.raises(ValueError, match=r"names no mask token \(mask_token_id in config.json\): `specjax train gad`"):
        registry.build_drafter(f"gad:model={folders / 'target'}", target)
    with pytest.raises(ValueError, match="the block drafter 'plain' has none"):
        registry.build_drafter(f"gad:model={folders / 'plain'}", target)
    with pytest.raises(ValueError, match="is a diffusion model: pick one that `specjax train gad` made"):
        registry.build_drafter("gad:model=tiny-diffusion", target)
    for line in ("gad", f"gad:model={folders / 'target'}", "gad:model=tiny-diffusion"):
        with pytest.raises(ValueError, match="^gad drafts for a target with an encoder, and plain has none$"):
            registry.build_drafter(line, plain)
    with pytest.raises(ValueError, match="no block drafter is shipped beside .*: name one with model=FOLDER"):
        registry.build_drafter("gad", target)


@pytest.mark.parametrize(
    ("make", "said"),
    (
        (lambda: Gad(Places(), MASK, recent=-1), "gad needs recent >= 0, got -1$"),
        (lambda: Gad(Places(), V).bind(TARGET), "mask_id 24 is outside"),
        (lambda: Gad(Places(), MASK).bind(tiny.TARGET), "has an encoder and the target has none"),
        (lambda: Gad(Places(30), MASK).bind(TARGET), "non-autoregressive model has 30 tokens and the target 24"),
        (lambda: dataclasses.replace(OBJECTIVE, block=0), "block must be at least 1"),
        (lambda: dataclasses.replace(OBJECTIVE, least=0.6), "0 <= least <= most <= 1"),
    ),
)
def test_bad_settings(make, said):
    with pytest.raises(ValueError, match=said):
        make()
