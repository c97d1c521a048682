"""P-EAGLE and DFlash heads as their code writes them, against their layers written out in float64."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.published import E, V, draw, llama, speculators, toy, vocabulary, write
from support.published_blocks import MASK, TEXT, Given, behind, reference, view_of, zlab
from support.steps_seen import read_text

from specjax.assembly.companions import Stored
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft import DFlash, Domino, DSpark, JetSpec, PEagle, Scored, adaptive
from specjax.draft.dflash.objective import Blocks, outputs
from specjax.draft.dflash.published import _from_anchor
from specjax.draft.domino.objective import TrainDomino
from specjax.draft.dspark.objective import TrainDSpark
from specjax.draft.heads.folder import read_head, save_head
from specjax.draft.heads.published import drafter_of
from specjax.expand import BestFirst, Chain
from specjax.lm import Block
from specjax.models import ModelError
from specjax.models.kv import commit_kv, init_kv
from specjax.objectives.base import Batch
from specjax.sampling import Sampler, SamplingArrays, row_keys


def by_speculators(config, **more):
    """The same head as speculators writes its configuration: the layers' nested, taps counted as boundaries."""
    nested = {key: x for key, x in config.items() if key in llama() or key in ("layer_types", "sliding_window")}
    return {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "transformer_layer_config": nested,
        "aux_hidden_state_layer_ids": [1, 3], "block_size": 4, "mask_token_id": MASK, "draft_vocab_size": V,
        "sample_from_anchor": False, "sliding_window_non_causal": False, "target_hidden_size": None, "projector_type": "dflash",
        **more,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 6, "both", "from_start", "causal"])
def test_a_dflash_block_is_the_published_one(window, tmp_path):
    """Slots after the last token, in a layer with a window and in one without; and training reads them as decoding
    does. The last one is JetSpec's, without a window."""
    both, from_start, causal = (word in str(window) for word in ("both", "from_start", "causal"))
    window = None if causal or window is None else 6
    name, kind = ("jetspec", JetSpec) if causal else ("dflash", DFlash)
    config, tensors = zlab(window=window)
    config = config | {"is_causal": False} if both else config
    config["dflash_config"] |= {"causal_head": True} if causal else {}
    own = by_speculators(config, sliding_window_non_causal=both) if from_start else config
    head = read_head(write(tmp_path, own, tensors), name, kind, toy())
    drafter, text = head.drafter, TEXT
    assert (drafter.taps, drafter.block, drafter.drafts, drafter_of(tmp_path)) == ((0, 2), 4, 3, name)
    assert "borrows the target's language-model head" in head.notes and "head" not in head.params
    if not from_start:
        assert any("the last layer before the final norm" in note for note in head.notes)  # the toy has three
    model, features, draft = behind(head, text)
    got = drafter.outputs(model, draft, view_of(text))[0]
    table = np.asarray(toy().params["embed"]["embedding"], np.float64)
    slots = table[[text[-1], MASK, MASK, MASK]]
    wanted = reference(tensors, np.asarray(features[0], np.float64), slots, window, both, from_start, causal)
    np.testing.assert_allclose(got, wanted[1:], rtol=1e-3, atol=1e-4)
    later = jnp.asarray([[*text, 1, 2, 3]])
    more = jnp.pad(features, ((0, 0), (0, 4), (0, 0)), constant_values=1e3)  # what lies after a block is not seen
    at = jnp.asarray([[3, len(text) - 1]])
    texts = Batch(later, jnp.ones_like(later, bool))
    taught = outputs(drafter, model, drafter.head.context(head.params, more, texts.positions), texts, at)
    np.testing.assert_allclose(taught[0, 1], got, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "causal"), [("causal", False), ("causal", True), ("causal_head", True)])
def test_a_slot_sees_the_whole_block_or_what_is_before_it(flag, causal, tmp_path):
    config, tensors = zlab(dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 2], flag: causal})
    name, kind = ("jetspec", JetSpec) if flag == "causal_head" else ("dflash", DFlash)
    head = read_head(write(tmp_path, config, tensors), name, kind, toy())
    text = TEXT[:9]
    model, _, draft = behind(head, text)
    embeds = head.drafter.slots(model, jnp.asarray([[text[-1]]]))[:, 0]

    def outputs(embeds):
        block = Block(
            jnp.zeros((1, 4), jnp.int32), draft.length[:, None] + jnp.arange(4)[None], draft.length, causal=False
        )
        return head.drafter.head(head.params, embeds, block, draft.cache)[0]

    moved = jnp.abs(outputs(embeds) - outputs(embeds.at[0, 3].add(1.0))).max(axis=-1) > 1e-6
    np.testing.assert_array_equal(moved, [not causal] * 3 + [True])


def test_where_the_first_token_is_drafted_from(tmp_path):
    """DeepSpec's files draft from slot 0 and do not say it; speculators' say it, and count layers as boundaries."""
    config, tensors = zlab()
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "num_anchors": 512,
        "markov_rank": 0,
        "target_layer_ids": [0, 2],
        "mask_token_id": MASK,
    }
    config.pop("dflash_config")
    folder = write(tmp_path / "deepspec", config, tensors)
    head = read_head(folder, "dflash", DFlash, toy())
    assert head.drafter.from_anchor and head.drafter.drafts == 4 and any("as DeepSpec's" in note for note in head.notes)
    assert read_head(folder, "dflash", DFlash, toy(), from_anchor=False).drafter.drafts == 3
    own = by_speculators(config, draft_vocab_size=40, sample_from_anchor=True)
    more = draw(9, {"embed_tokens.weight": (V, E), "lm_head.weight": (40, E)})
    folder = write(tmp_path / "speculators", own, {**tensors, **more, **vocabulary(40)})
    head = read_head(folder, "dflash", DFlash, toy())
    assert (head.drafter.taps, head.drafter.from_anchor, len(head.params["ids"])) == ((0, 2), True, 40)
    np.testing.assert_array_equal(head.params["mask"]["embedding"][0], head.params["embed"]["embedding"][MASK])


@pytest.mark.parametrize(
    ("layout", "usual", "config", "drafts"),
    [
        ("speculators", True, {}, True),  # a DSpark that does not say it
        ("speculators", False, {"num_anchors": 8}, False),
        ("speculators", True, {"sample_from_anchor": False}, False),
        ("torch", False, {}, False),
    ],
)
def test_a_file_that_does_not_say_where_it_drafts_from_gets_a_note(layout, usual, config, drafts):
    reader = SimpleNamespace(chosen={}, format=layout, notes=[])
    assert _from_anchor(reader, config, usual) is drafts
    assert bool(reader.notes) == (drafts and not config)


def test_windows_are_those_of_the_code_that_wrote_the_file(tmp_path):
    """speculators trains all layers with windows, causal inside a block, unless its file says otherwise."""
    config, tensors = zlab(window=6)
    files = {
        (True, False): config,
        (False, False): config | {"is_causal": False},
        (True, True): by_speculators(config),
        (False, True): by_speculators(config, sliding_window_non_causal=True),
    }
    for number, (wanted, own) in enumerate(files.items()):
        drafter = read_head(write(tmp_path / str(number), own, tensors), "dflash", DFlash, toy()).drafter
        assert (drafter.windows.causal, drafter.windows.from_start) == wanted
        assert (drafter.config.window(0), drafter.config.window(1)) == (6, None)


def test_a_published_block_is_drafted_whole(tmp_path):
    config, tensors = zlab(block=6)
    stored = parse("drafter", DRAFTERS, f"dflash:model={write(tmp_path, config, tensors)}")
    assert isinstance(stored, Stored) and stored.load(toy())[0].expander == Chain(5)
    with pytest.raises(ValueError, match="a block of 6 drafts 5 tokens, and the tree is 9 deep: choose"):
        parse("drafter", DRAFTERS, f"dflash:model={tmp_path},length=9").load(toy())


def test_a_jetspec_file_is_dflashs_with_a_flag(tmp_path):
    """Its tree is the published one, no deeper than the block; read as a DFlash it is causal too."""
    flagged = {"mask_token_id": MASK, "target_layer_ids": [0, 2], "causal_head": True}
    folder = write(tmp_path / "flagged", *zlab(block=6, dflash_config=flagged))
    drafter, _ = parse("drafter", DRAFTERS, f"jetspec:model={folder}").load(toy())
    assert (drafter.expander, drafter.causal, drafter_of(folder)) == (BestFirst(7, 5, 128), True, "jetspec")
    assert read_head(folder, "dflash", DFlash, toy()).drafter.causal
    with pytest.raises(ModelError, match="causal_head is not true: a head for another drafter"):
        read_head(write(tmp_path / "plain", *zlab()), "jetspec", JetSpec, toy())
    with pytest.raises(ValueError, match="jetspec: no slot sees a later one"):
        JetSpec(causal=False)


BAD = {
    "num_target_layers is 36": {"num_target_layers": 36},
    "architectures has 'DFlash2DraftModel'": {"architectures": ["DFlash2DraftModel"]},
    "markov_rank is 256: a head for another drafter than dflash": {"markov_rank": 256},
    "names no mask": {"dflash_config": {"target_layer_ids": [0, 2]}},
    "mask_token_id is 96, and the table": {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}},
    r"target_layer_ids \[2, 0\] are not ascending": {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2, 0]}},
    "unknown flag dflash_config.frob": {"dflash_config": {"frob": 1}},
    "block_size must be a number of slots": {"block_size": "x"},
    "Domino corrects blocks with a recurrent network": {"architectures": ["DominoDraftModel"]},
    "projector_type is 'domino': a head for another drafter than dflash": {"projector_type": "domino"},
    "layers.2.mlp": {"num_hidden_layers": 3},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_dflash_files_are_one_line_each(message, tmp_path):
    config, tensors = zlab(**BAD[message])
    with pytest.raises(ModelError, match=message) as caught:
        read_head(write(tmp_path, config, tensors), "dflash", DFlash, toy())
    assert "\n" not in str(caught.value)


def parallel(**config):
    """speculators' P-EAGLE: EAGLE-3's file, `mask_hidden`, and a table of embeddings that was trained."""
    own, tensors = speculators(speculators_model_type="peagle", mask_token_id=MASK, embed_requires_grad=True, **config)
    own["architectures"] = ["PEagleSpeculator"]
    return own, {**tensors, **draw(8, {"mask_hidden": (1, 1, 3 * E)})}


@pytest.mark.slow
def test_a_peagle_head_reads_masks_behind_the_last_pair(tmp_path):
    """Against one pass of EAGLE-3's layer over the pairs and, after them, the mask's embedding and `fc` of
    `mask_hidden`."""
    config, tensors = parallel()
    head = read_head(write(tmp_path, config, tensors), "peagle", PEagle, toy())
    assert drafter_of(tmp_path) == "peagle" and head.format == "speculators"
    drafter, text = head.drafter, TEXT[:9]
    model = {"target": toy().params, "draft": head.params}
    features = drafter.features(read_text(text, drafter.feature_wants))[:, :-1]
    pairs = Block(jnp.asarray([text[1:]]), jnp.arange(8)[None], jnp.zeros((1,), jnp.int32))
    h, past = drafter.read(model, features, pairs, None)
    cache = commit_kv(init_kv(drafter.config, 1, 16, jnp.float32), past, None, jnp.zeros((1,), jnp.int32))
    slots = Block(jnp.zeros((1, 2), jnp.int32), 8 + jnp.arange(2)[None], jnp.asarray([8]))
    got = drafter.logits(model, drafter.ahead(model, slots, cache)[0])
    # the same as EAGLE-3's own read of features that are `mask_hidden`, and of tokens that are the mask
    rows = np.broadcast_to(tensors["mask_hidden"].astype(np.float32), (1, 2, 3 * E))
    both = jnp.concatenate([features, jnp.asarray(rows)], axis=1)
    tokens = jnp.asarray([[*text[1:], MASK, MASK]])
    whole = Block(tokens, jnp.arange(10)[None], jnp.zeros((1,), jnp.int32))
    wanted, _ = drafter.read(model, both, whole, None)
    np.testing.assert_allclose(got, drafter.logits(model, wanted)[:, 8:], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(h, wanted[:, :8], rtol=1e-4, atol=1e-4)
    three = Block(jnp.zeros((1, 3), jnp.int32), 8 + jnp.arange(3)[None], jnp.asarray([8]))
    np.testing.assert_allclose(
        drafter.logits(model, drafter.ahead(model, three, cache)[0])[:, :2], got, rtol=1e-3, atol=1e-3
    )


def test_bad_peagle_files_are_one_line_each(tmp_path):
    config, tensors = parallel()
    kept = {name: x for name, x in tensors.items() if name != "mask_hidden"}
    short = {**tensors, "mask_hidden": tensors["mask_hidden"][:, :, :E]}
    unmasked = {key: x for key, x in config.items() if key != "mask_token_id"}
    cases = {
        "missing mask_hidden": (config, kept),
        "mask_hidden has shape .1, 1, 64., expected .1, 1, 192.": (config, short),
        r"names no mask: .*set the id that the head was trained with \(mask=ID\)": (unmasked, tensors),
        "is 'eagle3', a head for another drafter than peagle": (
            {**config, "speculators_model_type": "eagle3"},
            tensors,
        ),
    }
    for number, (message, file) in enumerate(cases.items()):
        with pytest.raises(ModelError, match=message):
            read_head(write(tmp_path / str(number), *file), "peagle", PEagle, toy())


def test_a_file_that_names_no_mask_takes_the_lines(tmp_path):
    """SpecForge's P-EAGLE does not. An id of the line goes before the file's; a head that was trained here has its mask."""
    config, tensors = parallel()
    unmasked = {key: x for key, x in config.items() if key != "mask_token_id"}
    for number, (file, line, row) in enumerate([(unmasked, ",mask=9", 9), (config, ",mask=9", 9), (config, "", MASK)]):
        folder = write(tmp_path / str(number), file, tensors)
        _, params = parse("drafter", DRAFTERS, f"peagle:model={folder}{line}").load(toy())
        np.testing.assert_array_equal(params["mask"]["embedding"][0], tensors["embed_tokens.weight"][row])
    with pytest.raises(ModelError, match="mask is 96, and the table of embeddings has 96 rows"):
        parse("drafter", DRAFTERS, f"peagle:model={folder},mask=96").load(toy())
    config, tensors = zlab(dflash_config={"target_layer_ids": [0, 2]})
    folder = write(tmp_path / "zlab", config, tensors)
    _, params = parse("drafter", DRAFTERS, f"dflash:model={folder},mask=9").load(toy())
    np.testing.assert_array_equal(params["mask"]["embedding"], toy().params["embed"]["embedding"][9:10])
    for kind in (PEagle, DFlash):
        name = kind.__name__.lower()
        drafter = kind(mask=9).bind(toy().lm)
        own = jax.tree.map(np.asarray, drafter.init_params(jax.random.key(0), toy().params))
        np.testing.assert_array_equal(own["mask"]["embedding"], toy().params["embed"]["embedding"][9:10])
        save_head(tmp_path / name, name, {"taps": list(drafter.taps)}, own, toy())
        with pytest.raises(ModelError, match="has the embedding of its mask, which was trained: leave mask=9 out"):
            read_head(tmp_path / name, name, kind, toy(), mask=9)


def spark(kind, confident=True, **config):
    """DeepSpec's DSpark: DFlash's layers, all keys at the top level, embeddings and a head of its own."""
    own, tensors = zlab(**config)
    nested = own.pop("dflash_config")
    own |= {
        **nested, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "markov_rank": 4, "markov_head_type": kind,
        "enable_confidence_head": confident, "confidence_head_with_markov": True,
    }  # fmt: skip
    shapes = {"embed_tokens.weight": (V, E), "lm_head.weight": (V, E)}
    shapes |= {"markov_head.markov_w1.weight": (V, 4), "markov_head.markov_w2.weight": (V, 4)}
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (4, E + 4), "markov_head.gate_proj.bias": (4,)}
    if kind == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (12, 8 + E), "markov_head.joint_proj.bias": (12,)}
    if confident:
        shapes |= {"confidence_head.proj.weight": (1, E + 4), "confidence_head.proj.bias": (1,)}
    loud = {name: x * 8 for name, x in draw(10, shapes).items()}
    return own, {**tensors, **loud}


def corrected(t, kind, h, text):
    """Logits and confidence of a block's slots along the tokens before them, in float64."""
    t = {name: np.asarray(x, np.float64) for name, x in t.items()}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    linear = lambda name, x: x @ t[f"{name}.weight"].T + t[f"{name}.bias"]
    state, dists, sure = np.zeros(4), [], []
    for hk, token in zip(h, text, strict=False):
        w = u = t["markov_head.markov_w1.weight"][token]
        if kind == "gated":
            u = sigmoid(linear("markov_head.gate_proj", np.concatenate([hk, w]))) * w
        if kind == "rnn":
            gate, new, out = np.split(linear("markov_head.joint_proj", np.concatenate([state, w, hk])), 3)
            state, u = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(new), np.tanh(out)
        dists.append(t["lm_head.weight"] @ hk + t["markov_head.markov_w2.weight"] @ u)
        sure.append(sigmoid(linear("confidence_head.proj", np.concatenate([hk, w]))[0]))
    return np.stack(dists), sure


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dspark_corrects_a_slot_by_the_token_before_it(kind, tmp_path):
    """Step by step as in decoding, and all at once along the text as in training."""
    config, tensors = spark(kind)
    head = read_head(write(tmp_path, config, tensors), "dspark", DSpark, toy())
    drafter, drafted = head.drafter, (11, 40, 3, 8)
    assert (drafter.drafts, drafter.from_anchor, drafter.confidence, drafter_of(tmp_path)) == (4, True, True, "dspark")
    model, _, draft = behind(head, TEXT)
    h = drafter.outputs(model, draft, view_of(TEXT))[0]
    dists, sure = corrected(tensors, kind, np.asarray(h, np.float64), (TEXT[-1], *drafted))
    given = dataclasses.replace(drafter, expander=Given(drafted))
    given.propose(model, draft, view_of(TEXT), Sampler(None, None, None, None, None))
    for (dist, (_, score)), wanted, certain in zip(given.expander.seen, dists, sure, strict=True):
        np.testing.assert_allclose(dist, wanted, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(score[0], certain, rtol=1e-3, atol=1e-4)
    blocks = Blocks(jnp.asarray([[(TEXT[-1], *drafted)]]), None, None, None, None, None)
    taught, logits = TrainDSpark(drafter)._slots(model, h[None, None], blocks)
    np.testing.assert_allclose(taught[0, 0], dists, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits[0, 0])), sure, rtol=1e-3, atol=1e-4)


def test_dspark_files_of_specforge_are_read(tmp_path):
    """All in `dflash_config`; early files have a prefix."""
    config, tensors = spark("vanilla", confident=False)
    moved = (
        "num_anchors",
        "markov_rank",
        "markov_head_type",
        "mask_token_id",
        "target_layer_ids",
        "enable_confidence_head",
    )
    nested = {key: config.pop(key) for key in moved} | {"projector_type": "dspark", "attention_mode": "gqa"}
    tensors = {f"logit_head.{n}" if n.startswith("markov") else n: x for n, x in tensors.items()}
    config |= {"dflash_config": nested, "architectures": ["DSparkDraftModel"]}
    head = read_head(write(tmp_path, config, tensors), "dspark", DSpark, toy())
    assert head.params["markov"]["table"]["embedding"].shape == (V, 4) and not head.drafter.confidence
    assert drafter_of(tmp_path) == "dspark"
    with pytest.raises(ValueError, match="Scored reads a confidence head, and this DSpark has none"):
        adaptive(head.drafter, Scored(), 4).bind(toy().lm)
    nested |= {"attention_mode": "mha", "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9}
    for alpha in (0.0, 1.0):  # which is of training, and says that there is a head where nothing else does
        nested |= {"confidence_head_alpha": alpha}
        del nested["enable_confidence_head"]
        more = draw(11, {"confidence_head.proj.weight": (1, E + 4), "confidence_head.proj.bias": (1,)} if alpha else {})
        file = write(tmp_path / str(alpha), config, {**tensors, **more})
        assert read_head(file, "dspark", DSpark, toy()).drafter.confidence == bool(alpha)
        nested["enable_confidence_head"] = False
    for key, value in (("markov_rank", 0), ("markov_head_type", "frob"), ("projector_type", "domino")):
        other = {**config, "dflash_config": {**nested, key: value}}
        with pytest.raises(ModelError, match=key):
            read_head(write(tmp_path, other, tensors), "dspark", DSpark, toy())


@pytest.mark.slow
def test_the_confidence_head_ends_a_chain():
    """Untrained, it says 1/2 of every token: a row stops below the first one, or not at all."""
    counts = []
    for threshold in (0.6, 0.5):
        drafter = adaptive(DSpark(block=3, rank=4), Scored(threshold), 3).bind(toy().lm)
        own = drafter.drafter.init_params(jax.random.key(8), toy().params)
        own = {"target": toy().params, "draft": {"drafter": own, "rule": None}}
        view, greedy = view_of(TEXT[:1]), SamplingArrays.make(1, temperature=0.0)
        sampler = Sampler(row_keys(0, ["a"]), view.tokens, view.length, view.live, greedy)
        tree = drafter.propose(own, drafter.init(own, 1, 32), view, sampler).tree
        counts.append(int(tree.valid.sum()))
    assert counts == [2, 4]


def domino(shift=True, plain=1, **config):
    """SpecForge's Domino: z-lab's layers, a recurrent network, a projection, and neither embedding nor head."""
    own, tensors = zlab(**config)
    own["dflash_config"] |= {
        "projector_type": "domino", "gru_hidden_dim": 6, "emb_dim": 5, "pure_draft_prefix_len": plain, "shift_label": shift,
    }  # fmt: skip
    shapes = {"prefix_gru.weight_ih_l0": (18, E), "prefix_gru.weight_hh_l0": (18, 6)}
    shapes |= {"embed_proj.0.weight": (5, E + 6), "embed_proj.2.weight": (V, 5)}
    loud = {name: x * 8 for name, x in draw(12, shapes).items()}
    return {**own, "architectures": ["DominoDraftModel"]}, {**tensors, **loud}


def along(t, base, h, text, plain):
    """Logits of a block's slots along the tokens before them, in float64."""
    t = {name: np.asarray(x, np.float64) for name, x in t.items()}
    table, sigmoid = np.asarray(toy().params["embed"]["embedding"], np.float64), lambda x: 1 / (1 + np.exp(-x))
    state, dists = np.zeros(6), []
    for j, (hj, token) in enumerate(zip(h, text, strict=False)):
        of_token = np.split(t["prefix_gru.weight_ih_l0"] @ table[token], 3)
        of_state = np.split(t["prefix_gru.weight_hh_l0"] @ state, 3)
        reset, update = (sigmoid(of_token[i] + of_state[i]) for i in (0, 1))
        state = (1 - update) * np.tanh(of_token[2] + reset * of_state[2]) + update * state
        inner = t["embed_proj.0.weight"] @ np.concatenate([hj, state])
        dists.append(base[j] + (j >= plain) * (t["embed_proj.2.weight"] @ (inner * sigmoid(inner))))
    return np.stack(dists)


@pytest.mark.parametrize(("shift", "plain"), [(True, 1), (False, 0)])
def test_domino_corrects_a_slot_by_all_tokens_before_it(shift, plain, tmp_path):
    """Step by step as in decoding, and all at once along the text as in training."""
    config, tensors = domino(shift, plain)
    head = read_head(write(tmp_path, config, tensors), "domino", Domino, toy())
    drafter, drafted = head.drafter, (11, 40, 3, 8)[: 3 + shift]
    assert (drafter.drafts, drafter.from_anchor, drafter.plain) == (len(drafted), shift, plain)
    assert drafter_of(tmp_path) == "domino"
    model, _, draft = behind(head, TEXT)
    h = drafter.outputs(model, draft, view_of(TEXT))
    base = drafter.logits(model, h)[0]
    dists = along(tensors, np.asarray(base, np.float64), np.asarray(h[0], np.float64), (TEXT[-1], *drafted), plain)
    assert [np.abs(a - b).max() > 0.1 for a, b in zip(dists, base, strict=True)] == [
        j >= plain for j in range(len(base))
    ]
    given = dataclasses.replace(drafter, expander=Given(drafted))
    given.propose(model, draft, view_of(TEXT), Sampler(None, None, None, None, None))
    np.testing.assert_allclose([dist for dist, _ in given.expander.seen], dists, rtol=1e-3, atol=1e-3)
    tokens = jnp.asarray([[(TEXT[-1], *drafted)]])
    nothing = jnp.zeros((1, 1, len(drafted)), jnp.int32)
    blocks = Blocks(tokens, base[None, None], nothing == 0, nothing == 0, None, nothing)
    taught, _ = TrainDomino(drafter).dists(model, h[:, None], blocks)
    np.testing.assert_allclose(taught[0, 0], dists, rtol=1e-3, atol=1e-3)


def test_bad_domino_files_are_one_line_each(tmp_path):
    """Files of early versions have a prefix; one that does not say where it drafts from does not draft from slot 0."""
    config, tensors = domino()
    nested = config["dflash_config"]
    early = {f"logit_head.{n}" if n.startswith(("prefix", "embed_proj")) else n: x for n, x in tensors.items()}
    silent = {key: x for key, x in nested.items() if key not in ("shift_label", "pure_draft_prefix_len")}
    file = write(tmp_path / "early", {**config, "num_anchors": 256, "dflash_config": silent}, early)
    drafter = read_head(file, "domino", Domino, toy()).drafter
    assert (drafter.drafts, drafter.plain, drafter_of(file)) == (3, 0, "domino")
    for message, more in {
        "gru_hidden_dim is None and emb_dim 5": {"gru_hidden_dim": None},
        "pure_draft_prefix_len must be a number of tokens, not 'x'": {"pure_draft_prefix_len": "x"},
        "a block of 4 drafts 4 tokens, and plain=4 leaves none": {"pure_draft_prefix_len": 4},
        "projector_type is 'dspark'": {"projector_type": "dspark"},
        "weight_hh_l0 has shape .18, 6., expected .21, 7.": {"gru_hidden_dim": 7},
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            read_head(
                write(tmp_path, {**config, "dflash_config": {**nested, **more}}, tensors), "domino", Domino, toy()
            )
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="domino: state and rank must be at least 1"):
        Domino(rank=0)
