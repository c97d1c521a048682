"""The published layout of Hydra and Hydra++ (zankner/Hydra)."""

from typing import Any

from specjax.draft.feature import layers_config
from specjax.draft.heads.layout import Layout, Reader, Sure, check_flags
from specjax.models.errors import ModelError


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a Hydra or Hydra++ head."""
    check_flags(
        reader, config, "hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads", "hidden_state_offset",
        "dropout_rate",
    )  # fmt: skip
    arch = config.get("hydra_head_arch", "mlp")
    if arch not in ("mlp", "prefix-mlp") or not config.get("grounded_heads", True) or config.get("hidden_state_offset"):
        raise ModelError(
            f"{reader.file}: hydra_head_arch={arch!r}, grounded_heads={config.get('grounded_heads')}, hidden_state_offset="
            f"{config.get('hidden_state_offset')}; supported are grounded mlp and prefix-mlp heads over the last hidden state"
        )
    size, vocab = target.lm.config.hidden_size, target.lm.vocab_size
    heads, layers = int(config["hydra_num_heads"]), int(config.get("hydra_num_layers", 1))
    reader.check_copy("input_embed_fn.weight", target)  # the target's table is a part of the saved module
    made = [_hydra_head(reader, i, layers, size, vocab) for i in range(heads)]
    params: dict[str, Any] = {"heads": made}
    prefix = arch == "prefix-mlp"
    if prefix:
        at = "prefix_embeding_layer"  # this is the files' spelling
        if f"{at}.embed_tokens.weight" in reader.tensors:
            reader.take(f"{at}.embed_tokens.weight", (vocab, size))  # never trained and never read
        own = layers_config(target.lm, "hydra")
        layer = reader.layer(f"{at}.layers.0", own, own.hidden_size)
        layer["attention_norm"] = reader.scale(f"{at}.layers.0.input_layernorm", size)
        params["prefix"] = {"layer": layer, "norm": reader.scale(f"{at}.norm", size)}
    return {"heads": heads, "layers": layers, "own_head": True, "prefix_layer": prefix}, params


def _hydra_head(reader: Reader, i: int, layers: int, size: int, vocab: int) -> dict[str, Any]:
    """The head that reads the root and i tokens after it. If it has dropouts, as in Hydra++, they take the even places."""
    dropouts = f"hydra_mlp.{i}.0.linear.weight" not in reader.tensors
    block = lambda j: f"hydra_mlp.{i}.{2 * j + 1 if dropouts else j}"
    shortcut = reader.linear(f"{block(0)}.res_connection", (i + 2) * size, size, bias=True)
    first = reader.linear(f"{block(0)}.linear", (i + 2) * size, size, bias=True)
    return {
        "input": {**first, "shortcut": shortcut["kernel"], "shortcut_bias": shortcut["bias"]},
        "blocks": [reader.linear(f"{block(j)}.linear", size, size, bias=True) for j in range(1, layers)],
        **reader.linear(f"hydra_lm_head.{i}.1" if dropouts else f"hydra_lm_head.{i}", size, vocab, bias=True),
    }


LAYOUT = Layout(
    read, said=lambda config: Sure.OWN if "hydra_num_heads" in config else Sure.NO, stems=("hydra_lm_head",)
)
