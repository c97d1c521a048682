"""MTP layers in the layouts of DeepSeek-V3, Qwen3-Next, MiMo and speculators, against the module of transformers."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.assembly.heads import named_head
from specjax.assembly.registry import build_drafter
from specjax.draft import MTP
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.expand import Chain
from specjax.lm import Block
from specjax.models import ModelError
from specjax.serve.engine import Engine

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
GLM = {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24, "mtp_layer_types": ["full_attention"],
}  # fmt: skip
LATENT = GLM | {
    "num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "partial_rotary_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
LITE = {"mlp_layer_types": ["dense", "sparse"], "mtp_mlp_layer_types": ["sparse"]}
EXPERTS = {"glm": GLM, "deepseek-v3": LATENT, "glm-lite": LATENT | LITE}
OWN = EXPERTS | {"hybrid": HYBRID}
LAYOUTS = {
    "glm": ("Glm4Moe", "model.layers.2", "enorm hnorm eh_proj shared_head.norm", "model.layers.2"),
    "deepseek-v3": ("DeepseekV3", "model.layers.2", "enorm hnorm eh_proj shared_head.norm", "model.layers.2"),
    "glm-lite": ("Glm4MoeLite", "model.layers.2", "enorm hnorm eh_proj shared_head.norm", "model.layers.2"),
    "deepseek": ("Llama", "model.layers.2", "enorm hnorm eh_proj shared_head.norm", "model.layers.2"),
    "qwen3-next": ("Qwen3", "mtp", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm", "mtp.layers.0"),
    "hybrid": ("Qwen3Next", "mtp", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm", "mtp.layers.0"),
    "mimo": (
        "Qwen2", "model.mtp_layers.0", "token_layernorm hidden_layernorm input_proj final_layernorm",
        "model.mtp_layers.0",
    ),
}  # fmt: skip
"""Family, where the module is, its own tensors' names, where its layer is: as their files have them."""


@functools.cache
def oracle(layout):
    """A target and its MTP layer of transformers, every parameter drawn: an initial norm of ones would hide a missing one."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpModel

    family = LAYOUTS[layout][0]
    torch.manual_seed(0)
    sizes = SIZES | {"num_mtp_layers": 1} | OWN.get(layout, {"mtp_layer_types": ["full_attention"]})
    config = getattr(transformers, f"{family}Config")(**sizes)
    config.mtp_hidden_states_first, config._attn_implementation = layout == "mimo", "eager"
    main = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    module = MtpModel(main, 1).eval()
    with torch.no_grad():
        biases = [
            (name, x) for part in (main, module.layers) for name, x in part.named_buffers() if "correction" in name
        ]
        for name, x in [*main.named_parameters(), *module.layers.named_parameters(), *biases]:
            x.copy_(0.2 * torch.randn(x.shape) + ("norm" in name))
    return main, module


def each_expert(tensors):
    """Experts one by one, as files of the hub have them; transformers joins them."""
    found = {}
    for name, x in tensors.items():
        at, _, kind = name.rpartition(".")
        if not at.endswith(".experts"):
            found[name] = x
            continue
        for number, own in enumerate(x):
            parts = {"gate": own[: len(own) // 2], "up": own[len(own) // 2 :]} if "gate_up" in kind else {"down": own}
            found |= {f"{at}.{number}.{part}_proj.weight": y for part, y in parts.items()}
    return found


def write(folder, layout, **config):
    """The target's folder with the module in it."""
    main, module = oracle(layout)
    _, at, names, layer = LAYOUTS[layout]
    main.save_pretrained(folder)
    own = dict(zip(("enorm", "hnorm", "eh_proj", "post_norm"), names.split(), strict=True))
    tensors = {}
    for name, x in each_expert(module.layers[0].state_dict()).items():
        first, _, rest = name.partition(".")
        tensors[f"{layer}.{rest}" if first == "mtp_block" else f"{at}.{own[first]}.{rest}"] = x.numpy()
    if layout == "deepseek" or layout in EXPERTS:  # copies of the target's, which its files hold
        tensors[f"{at}.embed_tokens.weight"] = main.model.embed_tokens.weight.detach().numpy()
        tensors[f"{at}.shared_head.head.weight"] = main.lm_head.weight.detach().numpy()
    both = {**load_file(folder / "model.safetensors"), **{n: np.ascontiguousarray(x) for n, x in tensors.items()}}
    save_file(both, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1, **config}
    for key in ("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types", "mtp_hidden_states_first"):
        said.pop(key, None)
    if layout == "mimo":
        said |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def entering(main, ids):
    """What enters the target's final norm."""
    import torch

    seen = []
    hook = main.model.norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    main(torch.tensor([ids]))
    hook.remove()
    return seen[0]


def drafts_of_transformers(layout, ids, depth):
    """The target's greedy token after `ids`, then `depth` drafts and their logits: each pass is fed its normed output."""
    import torch

    main, module = oracle(layout)
    with torch.no_grad():
        out = main(torch.tensor([ids]), output_hidden_states=True)
        tokens, hidden = [*ids[1:], int(out.logits[0, -1].argmax())], out.hidden_states[-1]
        if layout == "mimo":  # its makers' engine norms the features for the target's head alone
            hidden = entering(main, ids)
        dists = []
        for _ in range(depth):
            at = torch.arange(len(tokens))[None]
            made = module.forward_layer(0, hidden, at, None, input_ids=torch.tensor([tokens]))
            dists.append(module.shared_head(made[0, -1]).numpy())
            tokens = [*tokens, int(dists[-1].argmax())]
            hidden = torch.cat([hidden, made[:, -1:]], dim=1)
    return tokens[len(ids) - 1 :], np.stack(dists)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_target_offers_its_own_layer(layout, tmp_path):
    """Distributions of three depths and the tokens drafted along them, from the folder alone."""
    target = specjax.models.load(write(tmp_path, layout), dtype="float32")
    drafter, own = build_drafter("mtp", target)
    assert drafter.expander == Chain(3) and "head" not in own
    ids = np.random.default_rng(1).integers(3, 64, 11).tolist()
    tokens, wanted = drafts_of_transformers(layout, ids, 3)
    model = {"target": target.params, "draft": own}
    block = lambda tokens, at, **more: Block(
        jnp.asarray([tokens]), jnp.asarray([at]), jnp.zeros((1,), jnp.int32), **more
    )
    final = drafter.features(target.lm(target.params, block(ids, range(11)), None, wants=drafter.feature_wants))
    h, past = drafter.read(model, final, block([*ids[1:], tokens[0]], range(11)), None)
    dists = [drafter.logits(model, h)[0, -1]]
    for depth in (1, 2):
        seen = jnp.ones((1, 1, 11 + depth), bool)
        h, more = drafter.reread(
            model, h[:, -1:], block(tokens[depth : depth + 1], [10 + depth], visible=seen), None, past
        )
        past = specjax.models.kv.stack_past(past, more)
        dists.append(drafter.logits(model, h)[0, -1])
    np.testing.assert_allclose(np.stack(dists), wanted, rtol=1e-4, atol=1e-4)
    assert [int(dist.argmax()) for dist in dists] == tokens[1:]


TREE = "mtp:expander=top_k,k=2,depth=3,nodes=6"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "line"),
    (
        ("glm", TREE),
        ("glm", "mtp:rule=confidence,length=3"),
        ("hybrid", TREE),
        ("deepseek-v3", TREE),
        ("mimo", TREE),
    ),
)
def test_texts_are_those_of_plain_decoding(layout, line, tmp_path):
    """Greedy and sampled, from the folder alone; the layer has experts or reads what is not normed."""
    target = specjax.models.load(write(tmp_path, layout), dtype="float32")
    texts = []
    for drafter in ("none", line):
        engine = Engine(target, drafter=drafter)
        made = [engine.request([5, 9, 11, 5, 9, t], max_new_tokens=14, temperature=t % 2) for t in (4, 7, 9)]
        texts.append({str(record.prompt): record.tokens for record in engine.run(made, batch_size=3)})
    assert texts[0] == texts[1]


def test_a_routers_bias_is_not_rounded(tmp_path):
    target = specjax.models.load(write(tmp_path, "glm"), dtype="bfloat16")
    router = read_head(tmp_path, "mtp", MTP, target).params["layer"]["mlp"]["router"]
    assert (router["bias"].dtype, router["kernel"].dtype) == (jnp.float32, jnp.bfloat16)


def test_the_features_of_a_file_can_be_set(tmp_path):
    target = specjax.models.load(write(tmp_path, "mimo"), dtype="float32")
    found = [named_head(line, target)[1] for line in ("mtp", "mtp:final_norm=true")]
    assert [(head.drafter.final_norm, len(head.notes)) for head in found] == [(False, 1), (True, 0)]


def test_a_folder_is_known_by_its_layer(tmp_path):
    target = specjax.models.load(write(tmp_path, "qwen3-next"), dtype="float32")
    name, head = named_head("mtp", target)
    assert (name, head.format, drafter_of(tmp_path)) == ("mtp", "qwen3-next", "mtp")


def test_joined_experts_are_read_one_by_one(tmp_path):
    """Files of Qwen3.5 may have either form, and count the layer in their text's part."""
    target = specjax.models.load(write(tmp_path, "hybrid"), dtype="float32")
    want = read_head(tmp_path, "mtp", MTP, target).params

    def joined(tensors):
        at = "mtp.layers.0.mlp.experts"
        each = [[tensors.pop(f"{at}.{i}.{kind}_proj.weight") for kind in ("gate", "up", "down")] for i in range(6)]
        tensors[f"{at}.gate_up_proj"] = np.stack([np.concatenate(own[:2]) for own in each])
        tensors[f"{at}.down_proj"] = np.stack([own[2] for own in each])

    changed(tmp_path, joined)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_nextn_predict_layers": None, "text_config": {"mtp_num_hidden_layers": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert drafter_of(tmp_path) == "mtp"
    assert jax.tree.all(jax.tree.map(np.array_equal, read_head(tmp_path, "mtp", MTP, target).params, want))


def test_speculators_files_are_read(tmp_path):
    """Its module is MiMo's with the embedding first, in a folder without a target."""
    target = specjax.models.load(write(tmp_path / "target", "qwen3-next"), dtype="float32")
    at, own = LAYOUTS["qwen3-next"][1], {}
    names = dict(zip(LAYOUTS["qwen3-next"][2].split(), LAYOUTS["mimo"][2].split(), strict=True))
    for name, x in load_file(tmp_path / "target" / "model.safetensors").items():
        if name.startswith("mtp.layers.0."):
            own["mtp_layers.0." + name.removeprefix("mtp.layers.0.")] = x
        elif name.startswith("mtp."):
            first, _, rest = name.removeprefix(f"{at}.").partition(".")
            own[f"mtp_layers.0.{names[first]}.{rest}"] = x
    head = tmp_path / "head"
    head.mkdir()
    config = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    (head / "config.json").write_text(json.dumps({**config, "transformer_layer_config": {"model_type": "qwen3"}}))
    save_file(own, head / "model.safetensors")
    assert drafter_of(head) == "mtp"
    read, inside = (read_head(folder, "mtp", MTP, target) for folder in (head, tmp_path / "target"))
    assert read.format == "speculators"
    np.testing.assert_array_equal(read.params["fc"]["kernel"], inside.params["fc"]["kernel"])
    np.testing.assert_array_equal(read.params["norm"]["scale"], inside.params["norm"]["scale"])


def changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_head_that_is_no_copy_is_kept(tmp_path):
    folder = write(tmp_path, "deepseek")
    changed(
        folder,
        lambda tensors: tensors.update({"model.layers.2.shared_head.head.weight": np.ones((64, 32), np.float32)}),
    )
    head = read_head(folder, "mtp", MTP, specjax.models.load(folder, dtype="float32"))
    assert head.params["head"]["kernel"].shape == (32, 64) and "has a language-model head of its own" in head.notes


BAD = {
    "has no MTP layer: looked for mtp.fc.weight": lambda t: t.pop("mtp.fc.weight"),
    "missing mtp.norm.weight": lambda t: t.pop("mtp.norm.weight"),
    "unknown mtp.frob.weight": lambda t: t.update({"mtp.frob.weight": np.ones((1,), np.float32)}),
    "experts, and 'good' has none": lambda t: t.update({"mtp.layers.0.mlp.experts.0.up_proj.weight": np.ones(1, "f")}),
    "several MTP layers": lambda t: t.update({"mtp.layers.1.input_layernorm.weight": np.ones((1,), np.float32)}),
    "has shape": lambda t: t.update({"mtp.fc.weight": np.ones((32, 32), np.float32)}),
}  # fmt: skip


def test_bad_modules_are_one_line_each(tmp_path):
    target = specjax.models.load(write(tmp_path / "good", "qwen3-next"), dtype="float32")
    for number, (message, change) in enumerate(BAD.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_bytes((tmp_path / "good" / file).read_bytes())
        changed(folder, change)
        with pytest.raises(ModelError, match=message.replace("mtp.fc", ".*mtp.fc") if "looked" in message else message):
            read_head(folder, "mtp", MTP, target)
    bare = specjax.models.Model(target.lm, target.params)
    with pytest.raises(ValueError, match="your model has none: name model=FOLDER"):
        build_drafter("mtp", bare)
