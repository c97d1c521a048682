"""Gemma 4's assistants against transformers' own, over random weights: what is read, drafted and refused."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.conformance import TARGET, params
from support.shapes import changed

import specjax
from specjax.assembly.heads import named_head
from specjax.assembly.registry import build_drafter
from specjax.draft import Gemma4Assistant, adaptive
from specjax.draft.gemma4_assistant.objective import TrainGemma4Assistant
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.expand import Chain, TopK
from specjax.lm import Block, Wants
from specjax.models import ModelError
from specjax.models.kv import KVCache
from specjax.models.llama import LlamaLM
from specjax.objectives.base import Batch, read
from specjax.serve.engine import Engine

SIZES = {
    "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "sliding_window": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
TARGETS = {
    "own": {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "shared": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
}
"""Whether the last layers of the target have keys: the assistant reads those of the last that have."""
ASSISTANTS = {
    "own": {},
    "shared": {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3},
}


@functools.cache
def oracle(name):
    """A target and its assistant, every number drawn: an initial norm or scale of ones would hide a missing one."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = functools.partial(transformers.Gemma4TextConfig, **SIZES, intermediate_size=48)
    own = text(hidden_size=32, num_hidden_layers=4, layer_types=KINDS * 2, **TARGETS[name])
    heads = {k: x for k, x in TARGETS[name].items() if k in ("attention_k_eq_v", "num_global_key_value_heads")}
    small = text(
        hidden_size=24, num_hidden_layers=3, num_kv_shared_layers=3, layer_types=["sliding_attention", *KINDS], **heads
    )
    more = {"backbone_hidden_size": 32, **ASSISTANTS[name]}
    config = transformers.Gemma4AssistantConfig(text_config=small, **more)
    own._attn_implementation = config._attn_implementation = small._attn_implementation = "eager"
    made = transformers.Gemma4ForCausalLM(own).eval(), transformers.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for model in made:
            for tensor, x in [*model.named_parameters(), *model.named_buffers()]:
                if "token_ordering" in tensor:
                    x.copy_(torch.randperm(96))
                elif "layer_scalar" in tensor or x.requires_grad:
                    x.copy_(0.3 * torch.randn(x.shape) + ("norm" in tensor or "scalar" in tensor))
    return made


@pytest.fixture(params=TARGETS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a name, the folders of the target and of the assistant."""

    @functools.cache
    def write(name):
        at = tmp_path_factory.mktemp(name)
        for part, model in zip(("target", "assistant"), oracle(name), strict=True):
            model.save_pretrained(at / part)
        return at / "target", at / "assistant"

    return write


def drafts_of_transformers(name, ids, depth):
    """The target's greedy token after `ids`, then `depth` drafts and their distributions."""
    import torch

    main, assistant = oracle(name)
    with torch.no_grad():
        out = main(torch.tensor([ids]), output_hidden_states=True, return_shared_kv_states=True)
        tokens, hidden, dists = [int(out.logits[0, -1].argmax())], out.hidden_states[-1][:, -1:], []
        for _ in range(depth):
            embeds = main.get_input_embeddings()(torch.tensor([tokens[-1:]]))
            made = assistant(
                inputs_embeds=torch.cat([embeds, hidden], dim=-1), position_ids=torch.tensor([[len(ids)]]),
                shared_kv_states=dict(out.shared_kv_states.items()),
            )  # fmt: skip
            dists.append(made.logits[0, -1].numpy())
            tokens, hidden = [*tokens, int(dists[-1].argmax())], made.last_hidden_state
    return tokens, np.stack(dists)


@pytest.mark.slow
def test_drafts_are_those_of_transformers(name, folders):
    """Distributions of four depths and the tokens drafted along them; keys at the last token's position and after it
    hold garbage."""
    target, head = folders(name)
    target = specjax.models.load(target, dtype="float32")
    drafter, own = build_drafter(f"gemma4_assistant:model={head}", target)
    ids = np.random.default_rng(1).integers(3, 96, 11).tolist()
    tokens, wanted = drafts_of_transformers(name, ids, 4)
    model, at = {"target": target.params, "draft": own}, jnp.arange(11)[None]
    block = Block(jnp.asarray([ids]), at, jnp.zeros((1,), jnp.int32))
    out = target.lm(target.params, block, None, wants=Wants(final=True))
    cache = target.lm.commit(target.lm.init_cache(1, 16), out.delta, None, jnp.zeros((1,), jnp.int32))
    spoil = lambda xs: tuple(x.at[:, :, 11:].set(1e4) for x in xs)
    cache = KVCache(spoil(cache.key), spoil(cache.value))
    left, dists = out.final[:, -1:], []
    for token in tokens[:-1]:
        dist, left = drafter.ask(model, jnp.asarray([[token]]), left, jnp.asarray([11]), cache)
        dists.append(dist[0, 0])
    dist = np.stack(dists)
    read = np.isfinite(dist)
    assert read.sum(axis=1).tolist() == [24 if drafter.clusters else 96] * 4
    np.testing.assert_allclose(dist[read], wanted[read], rtol=1e-4, atol=1e-4)
    assert dist.argmax(axis=1).tolist() == tokens[1:]
    assert (wanted[~read].reshape(4, -1) < np.where(read, wanted, np.inf).min(axis=1, keepdims=True)).all()


PROMPTS = ([5, 9, 11, 5, 9, 11, 5, 9], [7], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    (
        ("own", "tree"),
        ("shared", "chain"),
        ("own", "adaptive"),
        ("shared", "tree"),
    ),
)
def test_texts_are_those_of_plain_decoding(name, kind, folders):
    """Greedy and sampled rows, longer than a window."""
    target, head = folders(name)
    target = specjax.models.load(target, dtype="float32")
    drafter, own = build_drafter(f"gemma4_assistant:model={head}", target)
    drafter = drafter.growing(TopK(k=2, depth=3, nodes=6) if kind == "tree" else Chain(3))
    both = adaptive(drafter, specjax.draft.Confidence(0.05), 3), {"drafter": own, "rule": None}
    texts = []
    for chosen in ("none", both if kind == "adaptive" else (drafter, own)):
        engine = Engine(target, drafter=chosen)
        made = [
            engine.request(ids, max_new_tokens=16, temperature=t) for ids, t in zip(PROMPTS, (0, 0, 1), strict=True)
        ]
        texts.append({str(record.prompt): record.tokens for record in engine.run(made, batch_size=3)})
    assert texts[0] == texts[1]


def test_a_folder_says_what_it_is(folders):
    target, head = folders("shared")
    model = specjax.models.load(target, dtype="float32")
    name, found = named_head(f"gemma4_assistant:model={head}", model)
    assert (name, found.format, drafter_of(head)) == ("gemma4_assistant", "gemma4_assistant", "gemma4_assistant")
    assert (found.drafter.clusters, found.drafter.top, found.drafter.layers) == (12, 3, 3)


@pytest.mark.parametrize("name", TARGETS)
def test_every_tensor_counts(name, folders, tmp_path):
    """One that is missing, over or misshapen is named."""
    target, head = folders(name)
    target = specjax.models.load(target, dtype="float32")
    stored = load_file(head / "model.safetensors")
    copy = shutil.copytree(head, tmp_path / "copy")
    changes = [(f"missing {tensor} ", {k: x for k, x in stored.items() if k != tensor}) for tensor in stored]
    changes.append((r"unknown model.frob \[2\]", stored | {"model.frob": np.zeros(2, np.float32)}))
    changes.append((r"model.norm.weight has shape \[5\]", stored | {"model.norm.weight": np.zeros(5, np.float32)}))
    changes.append(("lm_head.weight differs", stored | {"lm_head.weight": np.zeros((96, 24), np.float32)}))
    for said, tensors in changes:
        save_file(tensors, copy / "model.safetensors")
        with pytest.raises(ModelError, match=said):
            read_head(copy, "gemma4_assistant", Gemma4Assistant, target)


BAD = {
    "unknown flag 'frob'": {"frob": 1},
    "backbone_hidden_size: the head is 64 wide": {"backbone_hidden_size": 64},
    "num_centroids must be a positive integer": {"num_centroids": 0},
    "num_centroids 7, of which": {"num_centroids": 7},
    "the assistant reads 95 tokens": {"text_config": {"vocab_size": 95}},
    "an assistant shares the keys of all layers": {"text_config": {"num_kv_shared_layers": 1}},
    "enable_moe_block is True": {"text_config": {"enable_moe_block": True}},
    "a head of another kind": {"architectures": ["PEagleGemma4Assistant"]},
    "q_proj.weight has shape": {"text_config": {"head_dim": 4}},
}


def test_bad_configs_are_one_line_each(folders, tmp_path):
    target, head = folders("shared")
    target = specjax.models.load(target, dtype="float32")
    copy = shutil.copytree(head, tmp_path / "copy")
    good = json.loads((copy / "config.json").read_text())
    for said, change in BAD.items():
        config = {**good, **change, "text_config": {**good["text_config"], **change.get("text_config", {})}}
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=said):
            read_head(copy, "gemma4_assistant", Gemma4Assistant, target)


def test_a_target_must_have_what_it_asks_for():
    with pytest.raises(ValueError, match="12 clusters, of which 13 are read"):
        Gemma4Assistant(clusters=12, top=13).bind(TARGET)
    own = Gemma4Assistant().bind(TARGET).config
    with pytest.raises(ValueError, match="layers with a sliding window, and the target has none"):
        Gemma4Assistant(config=changed(own, sliding_window=4)).bind(TARGET)
    with pytest.raises(ValueError, match="layer 0 has 8 query heads of width 4, which do not go with the 4 of width 8"):
        Gemma4Assistant(config=changed(own, head_dim=4)).bind(TARGET)
    with pytest.raises(ValueError, match="of the Llama family, not of object"):
        Gemma4Assistant().bind(object())


@pytest.mark.slow
@pytest.mark.parametrize("window", (None, 5), ids=("whole", "window"))
def test_training_has_the_distributions_of_decoding(window):
    """Pass s of training, at every pair, against a draft of s tokens of the same text."""
    lm = LlamaLM(changed(TARGET.config, sliding_window=window))
    drafter = Gemma4Assistant(layers=2).bind(lm)
    target = params()["target"]
    own = {"target": target, "draft": drafter.init_params(jax.random.key(3), target)}
    batch = Batch(jnp.asarray(np.random.default_rng(2).integers(1, 96, (1, 10))), jnp.ones((1, 10), bool))
    output = read(lm, target, batch, Wants(final=True))
    cache = lm.commit(lm.init_cache(1, 12), output.delta, None, jnp.zeros((1,), jnp.int32))
    dists = [drafter.logits(own, h) for h in TrainGemma4Assistant(drafter, unroll=3).outputs(own, batch, output)]
    ask = jax.jit(drafter.ask)
    for first in (0, 3, 6):  # the pair that a draft begins with
        left = output.final[:, first : first + 1]
        for s in range(3):
            dist, left = ask(own, batch.tokens[:, first + s + 1, None], left, jnp.asarray([first + 1]), cache)
            np.testing.assert_allclose(dists[s][0, first + s], dist[0, 0], rtol=1e-4, atol=1e-4)
