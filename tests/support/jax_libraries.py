"""Trees as MaxText, Tunix and the library `gemma` have them, made from a Hugging Face folder: the other way round."""

import json

import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

FOLDED = ("llama", "mistral", "mixtral", "gemma", "gemma2")
PADDING = 3
"""Rows of no token after the table of embeddings."""


def write(folder, tree):
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


def _said(folder):
    """The fields and the numbers of a Hugging Face folder."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def _padded(table, axis=0):
    shape = tuple(PADDING if i == axis else size for i, size in enumerate(table.shape))
    return np.concatenate((table, np.full(shape, 9, table.dtype)), axis)


def _neighbours(x):
    """Channels of each head, those of its two halves in turn."""
    first, second = np.split(x, 2, axis=-1)
    return np.stack((first, second), axis=-1).reshape(x.shape)


def maxtext(folder, form):
    """A training state of MaxText. `form`: `apart`, `scanned`, or `blocks` of so many layers each, as `blocks 2`."""
    c, own = _said(folder)
    kind, width = c["model_type"], c["hidden_size"]
    gemma = kind.startswith("gemma")
    scale = c.get("query_pre_attn_scalar", c.get("head_dim") or width // c["num_attention_heads"]) ** -0.5
    head = c.get("head_dim") or width // c["num_attention_heads"]
    turned = kind == "llama" and '"llama3"' in json.dumps(c)
    norm = lambda x: x + np.float32(gemma)

    def layer(i):
        at = lambda name: own[f"model.layers.{i}.{name}.weight"]
        found = {f"self_attention/{ours}/kernel": at(f"self_attn.{theirs}_proj").T.reshape(width, -1, head)
                 for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"))}  # fmt: skip
        found["self_attention/out/kernel"] = at("self_attn.o_proj").T.reshape(-1, head, width)
        for name in ("query", "key", "value"):
            bias = own.get(f"model.layers.{i}.self_attn.{name[0]}_proj.bias")
            if bias is not None:
                found[f"self_attention/{name}/bias"] = bias.reshape(-1, head)
            if f"model.layers.{i}.self_attn.{name[0]}_norm.weight" in own:
                found[f"self_attention/{name}_norm/scale"] = norm(at(f"self_attn.{name[0]}_norm"))
        for name in ("query", "key") if turned else ():
            found[f"self_attention/{name}/kernel"] = _neighbours(found[f"self_attention/{name}/kernel"])
        if kind in FOLDED:
            found["self_attention/query/kernel"] = found["self_attention/query/kernel"] * np.float32(scale)
        if kind in ("gemma2", "gemma3_text"):
            found["pre_self_attention_norm/scale"] = norm(at("input_layernorm"))
            found["post_self_attention_norm/scale"] = norm(at("post_attention_layernorm"))
            found["pre_ffw_norm/scale"] = norm(at("pre_feedforward_layernorm"))
            found["post_ffw_norm/scale"] = norm(at("post_feedforward_layernorm"))
        elif gemma:
            found["pre_self_attention_norm/scale"] = norm(at("input_layernorm"))
            found["pre_ffw_norm/scale"] = norm(at("post_attention_layernorm"))
        else:
            found["pre_self_attention_layer_norm/scale"] = at("input_layernorm")
            found["post_self_attention_layer_norm/scale"] = at("post_attention_layernorm")
        if kind == "mixtral":
            block, e = "moe_block" if form == "apart" else "MoeBlock_0", range(c["num_local_experts"])
            found[f"{block}/gate/kernel"] = at("block_sparse_moe.gate").T
            for name, theirs in (("wi_0", "w1"), ("wi_1", "w3"), ("wo", "w2")):
                found[f"{block}/{name}"] = np.stack([at(f"block_sparse_moe.experts.{j}.{theirs}").T for j in e])
        else:
            for name, theirs in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
                found[f"mlp/{name}/kernel"] = at(f"mlp.{theirs}_proj").T
        return found

    def paired(local, other):
        named = lambda name, which: name.replace("/", f"_{which}/", 1)
        return {named(name, "local"): x for name, x in local.items()} | {
            named(name, "global"): x for name, x in other.items()
        }

    layers = [layer(i) for i in range(c["num_hidden_layers"])]
    if kind == "gemma2":
        layers = [paired(*layers[i : i + 2]) for i in range(0, len(layers), 2)]
    stacked = lambda some: {name: np.stack([one[name] for one in some], axis=1) for name in some[0]}
    if form == "apart":
        groups = {f"layers_{i}": one for i, one in enumerate(layers)}
    elif form == "scanned":
        groups = {"layers": stacked(layers)}
    else:
        every = int(form.split()[1])
        whole = len(layers) // every * every
        groups = {f"layers/layers_{i}": stacked(layers[i:whole:every]) for i in range(every)}
        groups |= {f"layers_remainder/layers_{i}": one for i, one in enumerate(layers[whole:])}
    factor = np.float32(width**0.5) if gemma else np.float32(1)  # 8 in the tests, which is exact in every type
    tree = {f"decoder/{group}/{name}": x for group, one in groups.items() for name, x in one.items()}
    tree["token_embedder/embedding"] = _padded(own["model.embed_tokens.weight"] * factor)
    tree["decoder/decoder_norm/scale"] = norm(own["model.norm.weight"])
    if "lm_head.weight" in own:
        tree["decoder/logits_dense/kernel"] = _padded(own["lm_head.weight"].T, axis=1)
    moments = {"token_embedder": {"embedding": np.zeros((2, 2), np.float32)}}
    params = unflatten_dict(tree, sep="/")
    return {"params": {"params": params}, "opt_state": {"mu": {"params": moments}}, "step": np.int32(7)}


def gemma(folder, form, transposed):
    """Parameters of the library. `form`: `flat`, `nested`, or `stacked N` with N kinds of layers; `transposed`: of the
    gate."""
    c, own = _said(folder)
    width, head = c["hidden_size"], c["head_dim"]
    heads, count = lambda x: x.reshape(-1, head, width).swapaxes(1, 2), c["num_hidden_layers"]
    norms = ("pre_attention", "input"), ("pre_ffw", "post_attention")
    if c["model_type"] != "gemma":
        norms = ("pre_attention", "input"), ("post_attention", "post_attention")
        norms += ("pre_ffw", "pre_feedforward"), ("post_ffw", "post_feedforward")
    tree = {
        "embedder/input_embedding": _padded(own["model.embed_tokens.weight"]),
        "final_norm/scale": own["model.norm.weight"],
        "embedder/mm_input_projection/w": np.zeros((2, 2), np.float32),
    }
    if form == "flat":
        tree["vision/posemb/scale"] = np.zeros((2,), np.float32)
    for i in range(count):
        at = lambda name, i=i: own[f"model.layers.{i}.{name}.weight"]
        q, k, v = (heads(at(f"self_attn.{name}_proj")) for name in "qkv")
        layer = {"attn/attn_vec_einsum/w": at("self_attn.o_proj").T.reshape(-1, head, width)}
        if len(q) == len(k):
            layer["attn/qkv_einsum/w"] = np.stack((q, k, v))
        else:
            layer |= {"attn/q_einsum/w": q, "attn/kv_einsum/w": np.stack((k, v))}
        gating = np.stack((at("mlp.gate_proj"), at("mlp.up_proj")))
        boxed = "" if form == "nested" else "/w"
        layer[f"mlp/gating_einsum{boxed}"] = gating if transposed else gating.swapaxes(1, 2)
        layer[f"mlp/linear{boxed}"] = at("mlp.down_proj").T
        layer |= {f"{ours}_norm/scale": at(f"{theirs}_layernorm") for ours, theirs in norms}
        if f"model.layers.{i}.self_attn.q_norm.weight" in own:
            layer |= {"attn/_query_norm/scale": at("self_attn.q_norm"), "attn/_key_norm/scale": at("self_attn.k_norm")}
        tree |= {f"layer_{i}/{name}": x for name, x in layer.items()}
    if form.startswith("stacked"):
        kinds = int(form.split()[1])
        names = [name.removeprefix("layer_0/") for name in tree if name.startswith("layer_0/")]
        for kind in range(kinds):
            for name in names:
                every = [tree[f"layer_{i}/{name}"] for i in range(kind, count, kinds)]
                tree[f"stacked_layers/attention_type_{kind}/{name}"] = np.stack(every)
        tree = {name: x for name, x in tree.items() if not name.startswith("layer_")}
    if form == "nested":
        return unflatten_dict(tree, sep="/")
    flat = {}
    for name, x in tree.items():
        module, _, kind = name.rpartition("/")
        outer = "SigLiPFromPatches_0" if name.startswith("vision") else "transformer"
        flat.setdefault(f"{outer}/{module}", {})[kind] = x
    return flat


def tunix(folder):
    """The parameters of a module of Tunix."""
    c, own = _said(folder)
    width, gemma = c["hidden_size"], c["model_type"].startswith("gemma")
    head = c.get("head_dim") or width // c["num_attention_heads"]
    tree = {
        "embedder/input_embedding": own["model.embed_tokens.weight"],
        f"final_norm/{'scale' if gemma else 'w'}": own["model.norm.weight"],
    }
    if "lm_head.weight" in own:
        tree["lm_head/w"] = own["lm_head.weight"].T
    for i in range(c["num_hidden_layers"]):
        at = lambda name, i=i: own[f"model.layers.{i}.{name}.weight"]
        q, k, v = (at(f"self_attn.{name}_proj").T.reshape(width, -1, head).swapaxes(0, 1) for name in "qkv")
        o = at("self_attn.o_proj").T.reshape(-1, head, width)
        if count := c.get("num_experts"):
            stack = lambda name, at=at, count=count: np.stack(
                [at(f"mlp.experts.{j}.{name}_proj").T for j in range(count)]
            )
            layer = {f"mlp/{name}_proj": stack(name) for name in ("gate", "up", "down")}
            layer["mlp/router/kernel"] = at("mlp.gate").T
        else:
            layer = {f"mlp/{name}_proj/kernel": at(f"mlp.{name}_proj").T for name in ("gate", "up", "down")}
        if gemma:
            joined = {"qkv": np.stack((q, k, v))} if len(q) == len(k) else {"q": q, "kv": np.stack((k, v))}
            layer |= {f"attn/{name}_einsum/w": x for name, x in joined.items()} | {"attn/attn_vec_einsum/w": o}
            norms = {"pre_attention": "input", "pre_ffw": "post_attention"}
            if c["model_type"] != "gemma":
                after = "post_attn" if c["model_type"] == "gemma2" else "post_attention"
                norms = {"pre_attention": "input", after: "post_attention"}
                norms |= {"pre_ffw": "pre_feedforward", "post_ffw": "post_feedforward"}
            layer |= {f"{ours}_norm/scale": at(f"{theirs}_layernorm") for ours, theirs in norms.items()}
            named = {"_query_norm/scale": "q", "_key_norm/scale": "k"}
        else:
            apart = {name: x.swapaxes(0, 1) for name, x in zip("qkv", (q, k, v), strict=True)}
            layer |= {f"attn/{name}_proj/w": x for name, x in apart.items()} | {"attn/o_proj/w": o}
            layer |= {f"{name}_layernorm/w": at(f"{name}_layernorm") for name in ("input", "post_attention")}
            named = {"q_norm/w": "q", "k_norm/w": "k"}
        if f"model.layers.{i}.self_attn.q_norm.weight" in own:
            layer |= {f"attn/{ours}": at(f"self_attn.{theirs}_norm") for ours, theirs in named.items()}
        for name in "qkv" if f"model.layers.{i}.self_attn.q_proj.bias" in own else ():
            layer[f"attn/{name}_bias"] = own[f"model.layers.{i}.self_attn.{name}_proj.bias"]
        tree |= {f"layers/{i}/{name}": x for name, x in layer.items()}
    return unflatten_dict(tree, sep="/")
