"""EAGLE-3 heads as SpecForge, speculators, vLLM and ModelOpt write them, against the layer written out in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import complete, plain, same
from support.published import E, V, draw, modelopt, specforge, speculators, toy, with_table, write
from support.shapes import changed
from support.steps_seen import read_text, row_texts, steps

from specjax.draft import Eagle3
from specjax.draft.heads.folder import load_head, read_head
from specjax.expand import Chain
from specjax.lm import Block
from specjax.models import ModelError

TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def norm(x, w):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w


def rope(x, heads):
    x = x.reshape(len(x), heads, 8)
    angle = np.arange(len(x))[:, None, None] / 10000 ** (np.arange(0, 8, 2) / 8)
    a, b, c, s = x[..., :4], x[..., 4:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def attend(t, at, nested, x, window):
    """What the attention of a layer adds, over pairs at positions 0, 1, ..."""
    linear = lambda x, name: x @ t[f"{at}.self_attn.{name}.weight"].T + t.get(f"{at}.self_attn.{name}.bias", 0)
    q, k, v = (linear(x, f"{name}_proj") for name in "qkv")
    q, k, v = q.reshape(-1, 8), k.reshape(-1, 8), v.reshape(len(x), 4, 8)
    if f"{at}.self_attn.q_norm.weight" in t:
        q, k = (norm(y, t[f"{at}.self_attn.{name}.weight"]) for y, name in ((q, "q_norm"), (k, "k_norm")))
    q, k = rope(q.reshape(len(x), -1), 8), rope(k.reshape(len(x), -1), 4)
    i, j = np.arange(len(x))[:, None], np.arange(len(x))[None]
    seen = (j <= i) & (j > i - window)
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 2, axis=1)) / np.sqrt(8)
    weight = np.where(seen, np.exp(scores - scores.max()), 0)
    out = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), np.repeat(v, 2, axis=1))
    return linear(out.reshape(len(x), -1), "o_proj")


def feed(t, at, h):
    """What its MLP adds."""
    m = norm(h, t[f"{at}.post_attention_layernorm.weight"])
    up, gate = (m @ t[f"{at}.mlp.{name}_proj.weight"].T for name in ("up", "gate"))
    return (gate / (1 + np.exp(-gate)) * up) @ t[f"{at}.mlp.down_proj.weight"].T


def layers(t, config, embeds, g):
    """The output of the layers: the first reads embeddings, then what the fc made; the others what the one before made."""
    at = "midlayer" if "midlayer.hidden_norm.weight" in t else "layers.0"
    nested = config.get("transformer_layer_config", config)
    kinds = nested.get("layer_types") or ["full_attention"]
    windows = [nested["sliding_window"] if kind == "sliding_attention" else len(g) for kind in kinds]
    n = norm(g, t[f"{at}.hidden_norm.weight"])
    x = np.concatenate([norm(embeds, t[f"{at}.input_layernorm.weight"]), n], -1)
    h = (n if config.get("norm_before_residual") else g) + attend(t, at, nested, x, windows[0])
    h = h + feed(t, at, h)
    for i in range(1, len(kinds)):
        h = h + attend(t, f"layers.{i}", nested, norm(h, t[f"layers.{i}.input_layernorm.weight"]), windows[i])
        h = h + feed(t, f"layers.{i}", h)
    return h


def reference(config, tensors, embeds, taps):
    """Logits of every pair, and of one more that feeds on the last one's output; `embeds` has a row more than `taps`."""
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    flags = {**config, **config.get("eagle_config", {})}
    if flags.get("norm_before_fc"):
        taps = norm(taps, t["input_norm.weight"])
    if flags.get("fc_norm"):
        parts = np.split(taps, 3, axis=-1)
        taps = np.concatenate([norm(x, t[f"fc_norm.{j}.weight"]) for j, x in enumerate(parts)], -1)
    g = taps @ t["fc.weight"].T
    h = layers(t, config, embeds[:-1], g)
    y = norm(h, t["norm.weight"])
    more = layers(t, config, embeds, np.concatenate([g, (y if config.get("norm_output") else h)[-1:]]))
    return np.concatenate([y, norm(more[-1:], t["norm.weight"])]) @ t["lm_head.weight"].T


def drafted(drafter, own, taps, tokens):
    """The same by the drafter."""
    model, width = {"target": toy().params, "draft": own}, len(taps)
    block = Block(jnp.asarray([tokens[:-1]]), jnp.arange(width)[None], jnp.zeros((1,), jnp.int32))
    h, delta = drafter.read(model, jnp.asarray(taps[None], jnp.float32), block, None)
    visible = jnp.ones((1, 1, width + 1), bool)
    last = Block(jnp.asarray([tokens[-1:]]), jnp.full((1, 1), width), jnp.zeros((1,), jnp.int32), visible)
    more, _ = drafter.reread(model, h[:, -1:], last, None, delta)
    return np.asarray(drafter.logits(model, jnp.concatenate([h, more], axis=1))[0])


def check(folder, config, tensors, embeds=None, **chosen):
    """Reads the file and compares its logits with the reference's; `embeds` `[V, H]` is the table that it should use."""
    target = toy()
    drafter, own = load_head(write(folder, config, tensors), "eagle3", Eagle3, target, **chosen)
    tokens = np.asarray(plain()[4][:9])
    table = np.asarray(target.params["embed"]["embedding"]) if embeds is None else embeds
    taps = np.random.default_rng(0).standard_normal((8, 3 * E))
    wanted = reference({**config, **chosen}, tensors, np.asarray(table, np.float64)[tokens], taps)
    np.testing.assert_allclose(drafted(drafter, own, taps, tokens), wanted, rtol=1e-3, atol=2e-4)
    return drafter, own


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", None])
def test_the_class_of_a_head_is_not_taken_for_its_targets(name, tmp_path):
    config, tensors = specforge(**TAPS)
    config["architectures"] = [name] if name else None
    read = check if name is None else lambda *file: load_head(write(*file), "eagle3", Eagle3, toy())
    drafter, own = read(tmp_path, config, tensors)
    assert drafter.taps == (0, 1, 2) and "embed" not in own


def test_fields_of_its_target_that_no_heads_code_reads_are_left_alone(tmp_path):
    """Those that models' configurations have, and those of the target's own; whatever else is not known may be the head's."""
    left = {"decoder_sparse_step": 1, "num_experts": 512, "clip_qkv": 8.0, "attn_output_gate": True}
    config, tensors = specforge(**TAPS, **left)
    drafter, _ = check(tmp_path / "head", config, tensors)
    notes = read_head(tmp_path / "head", "eagle3", Eagle3, toy()).notes
    assert any("reads: attn_output_gate, clip_qkv, decoder_sparse_step, num_experts" in note for note in notes)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"frob": 1, "text_config": {"fret": 2}}')
    file = write(tmp_path / "own", config | {"frob": 1, "fret": 3}, tensors)
    assert read_head(file, "eagle3", Eagle3, dataclasses.replace(toy(), path=tmp_path / "target")).drafter == drafter
    with pytest.raises(ModelError, match="unknown flag 'fret'"):
        read_head(file, "eagle3", Eagle3, toy())


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_a_rope_of_images_is_the_usual_one_on_text(kind, tmp_path):
    """`check` compares with rotations by `rope_theta` alone."""
    sections = {kind: "mrope", "mrope_section": [1, 1, 2]}
    drafter, _ = check(tmp_path, *specforge(**TAPS, rope_scaling=sections, rope_theta=10000.0))
    assert drafter.config.rope.scaling is None


def test_speculators_files_are_read(tmp_path):
    config, tensors = speculators(architectures=["Eagle3Speculator"])
    tensors = with_table(tensors)
    drafter, own = check(tmp_path, config, tensors)
    assert drafter.norm_before_residual and drafter.taps == (0, 1, 2) and "embed" not in own
    head = read_head(tmp_path, "eagle3", Eagle3, toy())
    assert head.format == "speculators" and "was made for lab/target" in head.notes


@pytest.mark.parametrize(
    "change,message",
    [
        ({"architectures": ["PEagleDraftModel"]}, "architectures has 'PEagleDraftModel', a head of another kind"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "attention is latent"),
        ({"architectures": ["GptOssForCausalLMEagle3"]}, "has experts"),
    ],
)
def test_heads_of_another_kind_are_refused_by_their_class(change, message, tmp_path):
    config, tensors = specforge(**TAPS, **change)
    with pytest.raises(ModelError, match=message):
        load_head(write(tmp_path, config, tensors), "eagle3", Eagle3, toy())


@pytest.mark.parametrize(
    "change,message",
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'"),
        ({"transformer_layer_config": {"model_type": "gpt_oss"}}, "transformer_layer_config.model_type is 'gpt_oss'"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both true"),
        ({"frob": 1}, "unknown flag 'frob'"),
    ],
)
def test_speculators_files_of_another_kind_are_refused(change, message, tmp_path):
    config, tensors = speculators(**change)
    with pytest.raises(ModelError, match=message):
        load_head(write(tmp_path, config, tensors), "eagle3", Eagle3, toy())


def test_modelopts_files_are_read_and_their_nested_norm_is_applied(tmp_path):
    config, tensors = modelopt()
    check(tmp_path / "plain", config, tensors)
    config, tensors = modelopt(norm_before_fc=True)
    drafter, _ = check(tmp_path / "normed", config, tensors)
    assert drafter.norm_before_fc
    for key, value in (("use_aux_hidden_state", False), ("parallel_draft_step", 4), ("use_mtp_layernorm", True)):
        config, tensors = modelopt(**{key: value})
        with pytest.raises(ModelError, match=f"eagle_config.{key} is {value}"):
            load_head(write(tmp_path / key, config, tensors), "eagle3", Eagle3, toy())


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_norms_before_the_fc_are_applied(flag, tmp_path):
    config, tensors = speculators(**{flag: True, "norm_output": True})
    drafter, _ = check(tmp_path, config, with_table(tensors))
    assert drafter.norm_output and getattr(drafter, flag)


def test_norm_output_can_be_overridden(tmp_path):
    """SpecForge once wrote this flag for another thing."""
    config, tensors = specforge(norm_output=True, **TAPS)
    check(tmp_path / "true", config, tensors)
    drafter, _ = check(tmp_path / "false", config, tensors, norm_output=False)
    assert not drafter.norm_output
    assert any("norm_output=false" in note for note in read_head(tmp_path / "true", "eagle3", Eagle3, toy()).notes)


def test_what_is_before_the_fc_is_for_the_targets_features_alone(tmp_path):
    config, tensors = speculators(fc_norm=True, norm_output=True)
    drafter, own = load_head(write(tmp_path, config, with_table(tensors)), "eagle3", Eagle3, toy())
    model, features = {"target": toy().params, "draft": own}, jnp.ones((1, 1, E))
    block = Block(jnp.asarray([[7]]), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
    wanted, _ = drafter.reread(model, features, block, None, None)
    nan = lambda x: jnp.full_like(x, jnp.nan)
    poisoned = {**own, "fc": {"kernel": nan(own["fc"]["kernel"])}}
    poisoned["tap_norms"] = {j: {"scale": nan(x["scale"])} for j, x in own["tap_norms"].items()}
    found, _ = drafter.reread({**model, "draft": poisoned}, features, block, None, None)
    np.testing.assert_array_equal(found, wanted)


def test_a_windowed_head_sees_its_window_and_no_more(tmp_path):
    windowed = {"layer_types": ["sliding_attention"], "sliding_window": 3, "use_sliding_window": True}
    config, tensors = speculators(windowed)
    drafter, _ = check(tmp_path, config, with_table(tensors))
    assert drafter.config.window(0) == 3
    full, _ = speculators({"layer_types": ["full_attention"], "sliding_window": 3})
    assert (
        load_head(write(tmp_path / "full", full, with_table(tensors)), "eagle3", Eagle3, toy())[0].config.window(0)
        is None
    )
    for change, message in (
        ({"sliding_window": None}, "sliding_window must be a number of tokens"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is"),
    ):
        bad, _ = speculators({**windowed, **change})
        with pytest.raises(ModelError, match=message):
            load_head(write(tmp_path / "bad", bad, with_table(tensors)), "eagle3", Eagle3, toy())


@pytest.mark.slow
def test_a_windowed_heads_cache_is_a_fresh_pass(tmp_path):
    """What prefill and steps made of the committed pairs is what one pass over them makes, the window included."""
    windowed = {"layer_types": ["sliding_attention"], "sliding_window": 5}
    config, tensors = speculators(windowed)
    head = write(tmp_path, config, with_table(tensors))
    drafter, own = load_head(head, "eagle3", Eagle3, toy(), expander=Chain(2))
    model = {"target": toy().params, "draft": own}
    _, states, _ = steps(drafter, model, 3)
    full = dataclasses.replace(drafter, config=changed(drafter.config, sliding_window=None))
    texts = row_texts(states[-1])
    longest = max(range(len(texts)), key=lambda row: len(texts[row]))
    text = texts[longest]
    features = drafter.features(read_text(text, drafter.feature_wants))[:, :-1]
    pairs = len(text) - 1
    block = Block(jnp.asarray([text[1:]]), jnp.arange(pairs)[None], jnp.zeros((1,), jnp.int32))
    wanted, other = (d.read(model, features, block, None)[0][0, -1] for d in (drafter, full))
    np.testing.assert_allclose(states[-1].draft.feature[longest], wanted, rtol=1e-3, atol=1e-4)
    assert float(jnp.abs(wanted - other).max()) > 1e-2


KINDS = ["full_attention", "sliding_attention", "full_attention"]


def deep(**layer):
    config, tensors = speculators({"num_hidden_layers": 3, "layer_types": KINDS, "sliding_window": 3, **layer})
    return config, with_table(tensors)


def test_several_layers_are_read(tmp_path):
    drafter, _ = check(tmp_path, *deep())
    assert (drafter.layers, [drafter.config.window(i) for i in range(3)]) == (3, [None, 3, None])


@pytest.mark.slow
def test_several_layers_run(tmp_path):
    drafter, own = load_head(write(tmp_path, *deep()), "eagle3", Eagle3, toy())
    drafter = dataclasses.replace(drafter, expander=Chain(2))
    got, state = complete(drafter, model={"target": toy().params, "draft": own})
    assert len(state.draft.cache.key) == 3
    same(got, plain())


def test_a_files_number_of_layers_is_that_of_its_tensors(tmp_path):
    config, tensors = deep(num_hidden_layers=4, layer_types=[*KINDS, "full_attention"])
    tensors = {name: x for name, x in tensors.items() if not name.startswith("layers.3.")}
    with pytest.raises(ModelError, match=r"missing layers.3.self_attn.q_proj.weight \[64, 64\]"):
        load_head(write(tmp_path, config, tensors), "eagle3", Eagle3, toy())
    config, tensors = deep()
    config["transformer_layer_config"]["num_hidden_layers"] = 1
    with pytest.raises(ModelError, match="layer_types is"):
        load_head(write(tmp_path, config, tensors), "eagle3", Eagle3, toy())
    config, tensors = deep()
    config["transformer_layer_config"] |= {"num_hidden_layers": 1, "layer_types": KINDS[:1]}
    with pytest.raises(ModelError, match=r"unknown layers.1.self_attn.q_proj.weight"):
        load_head(write(tmp_path, config, tensors), "eagle3", Eagle3, toy())
    forked = {**specforge(**TAPS)[1], "additional_layers.0.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(ModelError, match="additional_layers"):
        load_head(write(tmp_path / "fork", specforge(**TAPS)[0], forked), "eagle3", Eagle3, toy())


def test_qwen3_layers_have_head_norms_and_biases(tmp_path):
    config, tensors = speculators({"model_type": "qwen3", "attention_bias": True})
    drafter, _ = check(tmp_path, config, with_table(tensors))
    assert drafter.config.near.qk_norm and drafter.config.near.qkv_bias and drafter.config.near.o_bias


@pytest.mark.parametrize("trained", [True, False])
def test_embeddings_of_its_own_are_used(trained, tmp_path):
    config, tensors = speculators(embed_requires_grad=trained)
    _, own = check(tmp_path, config, tensors, embeds=tensors["embed_tokens.weight"])
    np.testing.assert_array_equal(own["embed"]["embedding"], tensors["embed_tokens.weight"].astype(np.float32))
    notes = " ".join(read_head(tmp_path, "eagle3", Eagle3, toy()).notes)
    assert "embeddings of its own" in notes and ("another target" in notes) != trained


def narrow():
    """A head half as wide as its target: SafeAILab's code leaves its table untrained, and its depth is the target's."""
    config, tensors = specforge(E // 2, target=E, target_hidden_size=E, num_hidden_layers=32, **TAPS)
    return config, {**tensors, **draw(8, {"embed_tokens.weight": (V, E // 2)})}


@pytest.mark.slow
def test_a_narrower_head_is_read_and_runs(tmp_path):
    config, tensors = narrow()
    drafter, own = check(tmp_path, config, tensors, embeds=tensors["embed_tokens.weight"])
    drafter = dataclasses.replace(drafter, expander=Chain(3))
    got, _ = complete(drafter, model={"target": toy().params, "draft": own})
    same(got, plain())


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda c, t: t.pop("embed_tokens.weight"), r"missing embed_tokens.weight \[96, 32\]"),
        (lambda c, t: c.pop("target_hidden_size"), "32 wide and 'toy' 64: it belongs to another target"),
        (lambda c, t: c.update(target_hidden_size=128), "128 wide and 'toy' 64: it belongs to another target"),
        (
            lambda c, t: t.update({"layers.1.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}),
            r"missing layers.1.self_attn.q_proj.weight \[64, 32\]",
        ),
    ],
)
def test_a_narrower_head_that_does_not_fit_is_named(change, message, tmp_path):
    config, tensors = narrow()
    change(config, tensors)
    with pytest.raises(ModelError, match=message):
        load_head(write(tmp_path, config, tensors), "eagle3", Eagle3, toy())


def test_a_whole_vocabulary_needs_no_map(tmp_path):
    config, tensors = speculators(count=V)
    _, own = check(tmp_path / "none", config, with_table(tensors))
    assert "ids" not in own
    empty = {"d2t": np.zeros((V,), np.int64), "t2d": np.zeros((V,), bool)}  # buffers that nobody filled
    _, own = check(tmp_path / "empty", config, with_table({**tensors, **empty}))
    assert "ids" not in own
    tensors.pop("lm_head.weight")
    head = read_head(write(tmp_path / "borrowed", config, with_table(tensors)), "eagle3", Eagle3, toy())
    assert "head" not in head.params and "borrows the target's language-model head" in head.notes


def test_a_map_of_ids_in_place_of_offsets_is_refused(tmp_path):
    config, tensors = specforge(**TAPS)
    tensors["d2t"] = np.flatnonzero(tensors["t2d"]).astype(np.int64)
    with pytest.raises(ModelError, match="d2t holds target ids, and must hold offsets"):
        load_head(write(tmp_path, config, tensors), "eagle3", Eagle3, toy())
