"""Models with an encoder: numbers, folders and texts are those of transformers, whatever the batch, tree, mesh and cache."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.tiny_encoders import KINDS, LENGTHS, build, draw

import specjax
from specjax import models
from specjax.decode import Beam
from specjax.lm import Block, Source, Wants
from specjax.models import LlamaLM, ModelError, hf_config
from specjax.models.caches.ems import EMS
from specjax.models.distances import DistancesConfig
from specjax.models.generation import left_out
from specjax.models.published_configs import CONFIGS
from specjax.search import exact_extract
from specjax.sharding import make_mesh
from specjax.tree import Topology

pytest.importorskip("transformers")

SPLIT, CAPACITY = 11, 40
DEEPEST = 4
"""The longest path of the tree."""
FAST = ("t5", "bart")


@pytest.fixture(scope="module")
def encodings(tmp_path_factory):
    """`encodings(name)`: the tiny model of a kind."""
    return functools.cache(lambda name, **drawn: build(name, tmp_path_factory.mktemp(name), **drawn))


def batch(sources):
    """Sources of ids or of frames as one `Source`, padded."""
    lengths = jnp.asarray([len(one) for one in sources], jnp.int32)
    if np.ndim(sources[0]) == 2:
        return Source(jnp.asarray(np.stack(sources)), lengths)
    ids = np.full((len(sources), max(map(len, sources)) + 3), -1, np.int32)
    for row, one in zip(ids, sources, strict=True):
        row[: len(one)] = one
    return Source(jnp.asarray(ids), lengths)


@functools.partial(jax.jit, static_argnums=0)
def read(lm, params, source, texts):
    """Logits `[B, T, V]` of texts `[B, T]`, read in two parts, and the cache after the first."""
    cache = lm.encode(params, lm.init_cache(len(texts), CAPACITY), source)

    def part(cache, first, last):
        own = texts[:, first:last]
        at = jnp.broadcast_to(jnp.arange(first, last)[None], own.shape)
        return lm(params, Block(own, at, jnp.full((len(own),), first)), cache, wants=Wants(logits=True))

    once = part(cache, 0, SPLIT)
    counts = jnp.full((len(texts),), SPLIT)
    cache = lm.commit(cache, once.delta, None, jnp.zeros_like(counts), counts)
    return jnp.concatenate([once.logits, part(cache, SPLIT, texts.shape[1]).logits], axis=1), cache


def texts_of(encoding):
    """A text for every source, `[B, T]`."""
    return np.random.default_rng(1).integers(3, encoding.vocab, (len(LENGTHS), 37)).astype(np.int32)


def near(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * max(1.0, np.abs(theirs).max() / 5))


def agrees(encoding):
    """Compares logits of ragged sources, and returns the loaded model."""
    model = models.load(encoding.folder, dtype="float32")
    texts, sources = texts_of(encoding), encoding.sources()
    ours, _ = read(model.lm, model.params, batch(sources), texts)
    for row, source in enumerate(sources):
        near(ours[row], encoding.logits(source, texts[row]))
    return model


@pytest.mark.parametrize("name", but_slow(KINDS, *(set(KINDS) - {*FAST})))
def test_logits_and_folders_are_those_of_transformers(encodings, name, tmp_path):
    """Of ragged sources, in two parts. What is written again loads as the same model, here and there."""
    encoding = encodings(name)
    model = agrees(encoding)
    assert model.starts == (encoding.torch.config.decoder_start_token_id,)
    models.save(tmp_path / "again", model.lm, model.params, generation=model.generation)
    again = models.load(tmp_path / "again", dtype="float32")
    assert again.lm == model.lm and again.starts == model.starts
    same = type(encoding.torch).from_pretrained(tmp_path / "again").eval()
    source, text = encoding.sources()[0], list(range(3, 20))
    theirs = encoding.logits(source, text)
    np.testing.assert_array_equal(dataclasses.replace(encoding, torch=same).logits(source, text), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, 2, 3))
@pytest.mark.parametrize("name", ("t5", "t5_gated", "bart", "mbart", "marian"))
def test_odd_sizes(name, seed, tmp_path):
    agrees(build(name, tmp_path, seed, **draw(name, seed)))


@pytest.mark.parametrize("name", but_slow(KINDS, *(set(KINDS) - {"t5"})))
def test_a_tree_is_its_paths(encodings, name):
    """After a text that was read in parts, by depth and not by place."""
    encoding = encodings(name)
    model = models.load(encoding.folder, dtype="float32")
    lm, params, sources = model.lm, model.params, encoding.sources()
    rng = np.random.default_rng(2)
    _, cache = read(lm, params, batch(sources), texts_of(encoding))
    parents = Topology.from_choices(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))).parents
    nodes = rng.integers(3, encoding.vocab, (len(sources), len(parents))).astype(np.int32)
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        seen[node] |= seen[parent] if node else False
    depth = seen.sum(axis=1) - 1
    base = jnp.full((len(sources),), SPLIT)
    block = Block(jnp.asarray(nodes), base[:, None] + depth[None], base, jnp.asarray(seen)[None])
    run = jax.jit(lambda block: lm(params, block, cache, wants=Wants(logits=True)).logits)
    tree = run(block)
    for node in range(len(parents)):
        path = np.flatnonzero(seen[node])
        at = np.resize(path, DEEPEST)  # nodes after the path are not read
        along = Block(jnp.asarray(nodes[:, at]), base[:, None] + jnp.arange(DEEPEST)[None], base)
        np.testing.assert_allclose(tree[:, node], run(along)[:, len(path) - 1], rtol=0, atol=2e-5)


NEW = 40
TEXTS = [("t5", "none"), ("bart", "token_recycling"), ("t5", "prompt_lookup"), ("t5_gated", "stand"), ("mt5", "lookahead"),
         ("mbart", "prompt_lookup"), ("marian", "token_recycling"), ("marian_apart", "prompt_lookup"),
         ("whisper", "token_recycling"), ("bart", "stand"), ("t5", "swift"), ("bart", "none")]  # fmt: skip
"""Kinds and drafters."""


@pytest.mark.parametrize(("name", "drafter"), [
    pytest.param(*pair, marks=() if pair in TEXTS[:2] else pytest.mark.slow) for pair in TEXTS
])  # fmt: skip
def test_texts_are_those_of_transformers(encodings, name, drafter):
    """Greedy, of ragged sources in one batch, and with a row filled again."""
    encoding = encodings(name)
    model = dataclasses.replace(models.load(encoding.folder, dtype="float32"), eos_ids=())
    sources = encoding.sources()
    found = specjax.generate(
        model, sources, decode=drafter, max_new_tokens=NEW, temperature=0, batch_size=2, progress=False
    )
    for record, source in zip(found, sources, strict=True):
        assert list(record.tokens) == encoding.greedy(source, model.starts, NEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), (("t5", "model=2"), ("bart", "data=2"), ("mbart", "model=2"), ("whisper", "data=2,model=2"))
)
def test_texts_on_a_mesh(encodings, name, mesh):
    """Also where the encoder's heads do not split, and the decoder's do."""
    encoding, sources = encodings(name), encodings(name).sources()
    mesh = make_mesh(mesh, jax.devices()[: 4 if "," in mesh else 2])
    texts = []
    for over in (None, mesh):
        model = dataclasses.replace(models.load(encoding.folder, dtype="float32", mesh=over), eos_ids=())
        found = specjax.generate(
            model,
            sources,
            decode="token_recycling",
            max_new_tokens=NEW,
            temperature=0,
            batch_size=4,
            mesh=over,
            progress=False,
        )
        texts.append([record.tokens for record in found])
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("int8", "bfloat16"))
def test_other_caches(encodings, kind):
    """Keys and values of a source are kept in the cache's type, and give nearly the same distributions."""
    encoding = encodings("bart")
    model = models.load(encoding.folder, dtype="float32", cache_dtype=kind)
    plain = models.load(encoding.folder, dtype="float32")
    texts, source = texts_of(encoding), batch(encoding.sources())
    ours, cache = read(model.lm, model.params, source, texts)
    exact, _ = read(plain.lm, plain.params, source, texts)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache.source.key)} <= {kind, "float32"}
    off = np.abs(jax.nn.softmax(ours) - jax.nn.softmax(exact)).max()
    assert 0 < off < 0.05


def test_buckets_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.t5.modeling_t5 import T5Attention

    away = np.arange(-700, 700)
    for both, count, reach in ((False, 32, 128), (True, 32, 128), (False, 8, 20), (True, 16, 50)):
        theirs = T5Attention._relative_position_bucket(torch.as_tensor(away), both, count, reach)
        config = DistancesConfig(1, count, reach, both)
        np.testing.assert_array_equal(config.buckets(away), theirs.numpy())
        np.testing.assert_array_equal(config.buckets(np.clip(away, -reach, reach)), theirs.numpy())


def test_what_cannot_be_read_is_said(encodings):
    model = models.load(encodings("bart").folder, dtype="float32")
    lm, params = model.lm, model.params
    source = batch([[5] * 50])
    with pytest.raises(ValueError, match="the source has 53 slots, and the cache has room for 40"):
        lm.encode(params, lm.init_cache(1, CAPACITY), source)
    block = Block(jnp.asarray([[2]]), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
    with pytest.raises(ValueError, match="a layer reads a source, and there is no cache that holds one"):
        lm(params, block, None, wants=Wants(logits=True))
    for said, why in (
        ({"model_type": "t5", "feed_forward_proj": "half-gelu"}, "feed_forward_proj must be"),
        ({"model_type": "t5", "relative_attention_num_buckets": 30}, "must be a multiple of 4"),
        ({"model_type": "bart", "encoder_attention_heads": 7}, "heads divide d_model 1024"),
        ({"model_type": "whisper", "num_mel_bins": 0}, "num_mel_bins and max_source_positions must be positive"),
    ):
        with pytest.raises(ModelError, match=why):
            hf_config.from_hf(said)
    assert LlamaLM(hf_config.from_hf({"model_type": "bart"})).config.encoder.longest == 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", ("t5", "bart", "mbart"))
@pytest.mark.parametrize("length_penalty", (1.0, 2.0))
def test_beams_are_those_of_transformers(encodings, name, length_penalty):
    """All four, with their scores. Texts end where they say so themselves."""
    encoding = encodings(name)
    model, sources = models.load(encoding.folder, dtype="float32"), encoding.sources()
    found = specjax.generate(
        model, sources, decode=Beam(num_beams=4, length_penalty=length_penalty), num_return_sequences=4, max_new_tokens=12,
        batch_size=2, progress=False,
    )  # fmt: skip
    for row, source in enumerate(sources):
        theirs = encoding.torch.generate(
            **encoding.asked(source), num_beams=4, num_return_sequences=4, length_penalty=length_penalty, do_sample=False,
            max_new_tokens=12, use_cache=False, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        for one, ids, score in zip(found[4 * row :], theirs.sequences, theirs.sequences_scores, strict=False):
            wanted = ids[1:].tolist()
            assert list(one.tokens) == wanted[: len(one.tokens)] and set(wanted[len(one.tokens) :]) <= {encoding.pad}
            assert one.score == pytest.approx(float(score), rel=1e-4)


@pytest.mark.slow
def test_the_best_span_of_a_source(encodings):
    """Every span's probability is that of transformers."""
    encoding = encodings("t5")
    model = models.load(encoding.folder, dtype="float32")
    source = encoding.sources()[0]
    passage = source[4:10]
    found = exact_extract(
        model.lm, model.params, model.starts, passage, eos=model.eos_ids, longest=4, count=18, source=source
    )
    assert len(found) == 18
    for span in found:
        text = [*model.starts, *passage[span.start : span.stop]]
        dists = jax.nn.log_softmax(encoding.logits(source, text))
        own = sum(float(dists[at, token]) for at, token in enumerate([*text[1:], *model.eos_ids]))
        assert span.log_prob == pytest.approx(own, rel=1e-4)
    with pytest.raises(ValueError, match="source"):
        exact_extract(model.lm, model.params, model.starts, passage, eos=model.eos_ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("t5", "bart"))
def test_an_adapter_changes_both_sides(name, tmp_path):
    """As PEFT merges it; one of BART has no bias of logits."""
    peft = pytest.importorskip("peft")
    encoding = build(name, tmp_path / "model")
    target = ["q", "v"] if name == "t5" else ["q_proj", "v_proj"]
    adapted = peft.get_peft_model(encoding.torch, peft.LoraConfig(r=4, target_modules=target, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    merged = dataclasses.replace(encoding, torch=adapted.merge_and_unload())
    model = models.load(encoding.folder, dtype="float32", adapter=tmp_path / "adapter")
    texts, sources = texts_of(encoding), encoding.sources()
    ours, _ = read(model.lm, model.params, batch(sources), texts)
    for row, source in enumerate(sources):
        near(ours[row], merged.logits(source, texts[row]))


@pytest.mark.parametrize("name", ("t5", "whisper"))
def test_published_sizes(name):
    """Parameters of the large ones, in billions, as their cards say."""
    known = {"t5": ("google/flan-t5-xl", 2.85), "whisper": ("openai/whisper-large-v3", 1.54)}
    hub, billions = known[name]
    shapes = LlamaLM(hf_config.from_hf(CONFIGS[hub])).abstract()
    assert sum(x.size for x in jax.tree.leaves(shapes)) / 1e9 == pytest.approx(billions, rel=5e-3)


def test_what_other_models_have_is_refused(encodings):
    model = models.load(encodings("bart").folder, dtype="float32")
    with pytest.raises(ModelError, match="cannot be widened: it has an encoder"):
        models.widen(model, 2)
    with pytest.raises(ValueError, match="attention over a source"):
        dataclasses.replace(model.lm, old=EMS(4, 4, budget=8), ahead=16)


def test_prompts_that_an_encoder_cannot_read_are_said_before_any_work(encodings):
    whisper, bart = (models.load(encodings(name).folder, dtype="float32") for name in ("whisper", "bart"))
    frames = encodings("whisper").sources()[0]
    for given, why in (
        (frames.T, r"reads features \[60, 10\], and these are \[10, 60\], features first: give their .T"),
        (frames[:40], r"reads features \[60, 10\], and these are \[40, 10\]"),
        (frames * np.nan, "features that are not finite"),
        ([5, 6], r"reads features, not list: .*input_features\[0\].T"),
    ):
        with pytest.raises(ValueError, match=why):
            specjax.generate(whisper, [frames, given], max_new_tokens=4, progress=False)
    with pytest.raises(ValueError, match="the prompt has 65 tokens, and the encoder of .* has room for 64"):
        specjax.generate(bart, [[5] * 65], max_new_tokens=4, progress=False)


def test_how_texts_begin(encodings, tmp_path):
    """Forced ids count up to a place that transformers would fill in by itself, and that is said."""
    folder = shutil.copytree(encodings("whisper").folder, tmp_path / "model")
    for forced, starts in (([[1, 7], [2, 9]], (3, 7, 9)), ([[1, None], [2, 9]], (3,)), (None, (3,))):
        said = json.loads((folder / "generation_config.json").read_text()) | {"forced_decoder_ids": forced}
        (folder / "generation_config.json").write_text(json.dumps(said))
        model = models.load(folder, dtype="float32")
        assert model.starts == starts
        assert ("forced_decoder_ids" in (left_out(model, (), False) or "")) == (starts == (3,) and bool(forced))
    (folder / "generation_config.json").write_text(json.dumps(said | {"forced_decoder_ids": [4]}))
    with pytest.raises(ModelError, match="forced_decoder_ids pairs of a place and an id"):
        models.load(folder)
