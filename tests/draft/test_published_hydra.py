"""Hydra and Hydra++ as their training saves them: `torch.save` of the module that also holds the target's embedding."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import plain
from support.published import E, V, decoder_layer, draw, toy

from specjax.draft import Hydra
from specjax.draft.heads.folder import load_head
from specjax.draft.hydra import head_logits
from specjax.models import ModelError

torch = pytest.importorskip("torch")
HEADS, LAYERS = 3, 3


def block(inputs, outputs):
    linear = torch.nn.Linear(inputs, outputs)
    return {"weight": linear.weight.data, "bias": linear.bias.data}


def hydra(prefix):
    """The state of HydraMLP or HydraPrefixMLP: `nn.Sequential` counts dropouts too, and one block is repeated.

    Returns:
      The `config.json` and the tensors, of float32.
    """
    torch.manual_seed(0)
    modules = {}
    for i in range(HEADS):
        own = [{"linear": block((i + 2) * E, E), "res_connection": block((i + 2) * E, E)}]
        own += [{"linear": block(E, E)}] * (LAYERS - 1)
        places = [2 * j + 1 for j in range(LAYERS)] if prefix else range(LAYERS)
        for place, parts in zip(places, own, strict=True):
            modules |= {f"hydra_mlp.{i}.{place}.{name}": part for name, part in parts.items()}
        modules[f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}"] = block(E, V)
    tensors = {f"{at}.{name}": x for at, parts in modules.items() for name, x in parts.items()}
    table = torch.tensor(np.asarray(toy().params["embed"]["embedding"]))
    tensors["input_embed_fn.weight"] = table.half().float()
    if prefix:
        at = "prefix_embeding_layer"
        shapes = decoder_layer(f"{at}.layers.0", E)
        shapes |= {f"{at}.layers.0.input_layernorm.weight": (E,), f"{at}.norm.weight": (E,)}
        tensors |= {name: torch.from_numpy(x) for name, x in draw(5, shapes, np.float32).items()}
        tensors[f"{at}.embed_tokens.weight"] = torch.nn.Embedding(
            V, E
        ).weight.data  # a model's own, which nobody trains
        tensors[f"{at}.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    config = {
        "base_model_name_or_path": "lab/target", "grounded_heads": True, "hidden_state_offset": 0, "hydra_num_layers": LAYERS,
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp", "hydra_num_heads": HEADS, "transformers_version": "4.34.1",
    }  # fmt: skip
    return config, tensors


def publish(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "hydra_lm_head.pt")
    return folder


@pytest.mark.parametrize("prefix", [False, True])
def test_what_training_saves_is_read_and_gives_its_distributions(prefix, tmp_path):
    config, tensors = hydra(prefix)
    drafter, own = load_head(publish(tmp_path, config, tensors), "hydra", Hydra, toy())
    assert (drafter.heads, drafter.layers, drafter.prefix_layer) == (HEADS, LAYERS, prefix) and (
        "prefix" in own
    ) == prefix
    feature = torch.randn(1, E, generator=torch.Generator().manual_seed(1))
    embeds = tensors["input_embed_fn.weight"][torch.tensor(plain()[4][:HEADS])]
    for i in range(HEADS):
        x = torch.cat([feature, embeds[: i + 1].reshape(1, -1)], dim=-1)
        linear = lambda x, at: torch.nn.functional.linear(x, tensors[f"{at}.weight"], tensors[f"{at}.bias"])
        silu = torch.nn.functional.silu
        places = [2 * j + 1 if prefix else j for j in range(LAYERS)]
        at = f"hydra_mlp.{i}.{places[0]}"
        h = linear(x, f"{at}.res_connection") + silu(linear(x, f"{at}.linear"))
        for place in places[1:]:
            h = h + silu(linear(h, f"hydra_mlp.{i}.{place}.linear"))
        wanted = linear(h, f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}")
        found = head_logits(own["heads"][i], jnp.asarray(x.numpy()))
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-4)
    if prefix:
        scale = tensors["prefix_embeding_layer.norm.weight"].numpy()
        np.testing.assert_array_equal(own["prefix"]["norm"]["scale"], scale)


@pytest.mark.parametrize(
    "prefix,change,message",
    [
        (
            False,
            lambda t: t.update({"input_embed_fn.weight": torch.zeros(V, E)}),
            "input_embed_fn.weight is not the embedding",
        ),
        (True, lambda t: t.update({"input_embed_fn.weight": torch.zeros(V, E)}), "belongs to another target"),
        (False, lambda t: t.pop("hydra_mlp.1.2.linear.bias"), "missing hydra_mlp.1.2.linear.bias"),
        (True, lambda t: t.pop("hydra_lm_head.2.1.weight"), "missing hydra_lm_head.2.1.weight"),
        (
            True,
            lambda t: t.update({"prefix_embeding_layer.embed_tokens.weight": torch.zeros(V, 2 * E)}),
            r"prefix_embeding_layer.embed_tokens.weight has shape \[96, 128\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(prefix, change, message, tmp_path):
    config, tensors = hydra(prefix)
    change(tensors)
    with pytest.raises(ModelError, match=message):
        load_head(publish(tmp_path, config, tensors), "hydra", Hydra, toy())
