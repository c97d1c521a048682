"""The parts of a model's configuration in words, for the table of families; see tables.py."""

from specjax.models import ModelConfig


def norms(config: ModelConfig) -> str:
    kinds = {"rounded": "rounded, times w", "wide": "times w in float32", "offset": "times 1 + w in float32"}
    layer, own = config.layers[-1], config.attention_sizes
    more = {
        "minus the mean": config.norm.mean and not config.norm.bias,
        "minus the mean, with a bias": config.norm.mean and config.norm.bias,
        "one for attention and MLP": layer.parallel == "one_norm",
        "after each sum": layer.sum_norms,
        "of the embedding": config.embedding.norm and config.encoder,
        "of the embedding, not before the first attention": config.embedding.norm and not config.encoder,
        "after attention and MLP too": layer.post_norms and layer.pre_norms,
        "after attention and MLP, not before": layer.post_norms and not layer.pre_norms,
        "of q and k": own.qk_norm and own.norm_first, "of q and k after the rope": own.qk_norm and not own.norm_first,
        "of q and k over all heads": own.qk_wide_norm, "of each head of q and k": own.qk_head_norm, "of v": own.value_norm,
    }  # fmt: skip
    return "; ".join((kinds[config.norm.kind], *(what for what, has in more.items() if has)))


def _states(config: ModelConfig) -> str:
    """How many layers have a mixer with a running state, and where."""
    kinds = sorted({one.called for one in config.state_mixers})
    layers, found = config.num_hidden_layers, len(config.state_mixers)
    beside = any(len(layer.mixers) > 1 for layer in config.layers)
    what = f"{' and '.join(kinds)} {'beside it' if beside else 'in its place'}"
    return what if found == layers else f"{what} in {found} of {layers} layers"


def attention(config: ModelConfig) -> str:
    if not config.slot_mixers:
        return _states(config)
    own = config.near
    ropes = [one.rope for one in config.attentions]
    still, share = ropes.count(None), config.rope.share
    if not ropes:
        latent = "[latent](#latent-attention)"
        return f"{latent}; {_states(config)}" if config.state_mixers else latent
    said = {
        _states(config): config.state_mixers,
        "beside the MLP": config.layers[0].parallel,
        "bias on q, k and v": own.qkv_bias and not own.o_bias,
        "[over a source](#models-with-an-encoder) too": config.encoder,
        "scores are not scaled, and depend on distances": config.distances,
        "a scale of its own": own.scale is not None and config.distances is None,
        f"scores within {own.soft_cap}": own.soft_cap is not None,
        "biases": own.o_bias,
        "queries grow with positions": own.query_scale is not None,
        "layers with a window see chunks of it": own.chunked,
        "sinks": own.sinks,
        f"{share:g} of a head is rotated": share < 1,
        "gates of heads": own.gated,
        "no positions": still == len(ropes) and config.embedding.positions is None and config.distances is None,
        "learned positions": config.embedding.positions and not config.embedding.positions.sinusoids,
        "positions are sinusoids": config.embedding.positions and config.embedding.positions.sinusoids,
        f"{still} of {len(ropes)} layers without positions": 0 < still < len(ropes),
        "where queries grow with positions": len({one.query_scale for one in config.attentions}) > 1,
        "full layers: a rope of their own": len({*ropes} - {None}) > 1,
        "full layers: a head width of their own": len({one.head_dim for one in config.attentions}) > 1,
        "a branch of low rank": config.layers[0].laurel,
        "full layers: kv-heads of their own": len({one.num_key_value_heads for one in config.attentions}) > 1,
        "values of another width than keys": own.value_dim != own.head_dim,
        "values times a factor": own.value_scale != 1,
    }
    return "; ".join(what for what, has in said.items() if has)


_ACTIVATIONS = {
    "silu": "SiLU", "gelu_pytorch_tanh": "GELU (tanh)", "gelu": "GELU", "relu": "ReLU", "relu2": "the square of ReLU",
    "xielu": "xIELU",
}  # fmt: skip


def mlp(config: ModelConfig) -> str:
    feeds = [layer for layer in config.layers if layer.feed is not None]
    if not feeds:
        return "none"
    gate = _ACTIVATIONS[config.dense.hidden_act] + ("" if config.dense.gated else ", no gate")
    gate = f"{gate}, biases" if config.dense.bias else gate
    gate = f"{gate}, gates cut off in the first layers" if config.dense.sparsity else gate
    sparse = [one.experts is not None for one in feeds]
    whole = len(feeds) == config.num_hidden_layers
    first = whole and not sparse[0] and sparse == sorted(sparse)
    if config.experts is None:
        return gate if config.layers[0].residual_multiplier == 1 else f"{gate}; a multiplier of every branch"
    said = {
        "chosen by sigmoids with a learned bias": config.experts.scoring == "sigmoid",
        "chosen one after the other": config.experts.scoring == "sparsemixer",
        "chosen with a learned bias": config.experts.scoring == "biased",
        "whose inputs are weighted": config.experts.scoring == "inputs",
        "others that every token has": config.experts.shared is not None and not config.experts.shared_gate,
        "others that every token has, by a gate": config.experts.shared_gate,
        "none in the first layers": first,
        f"in {sparse.count(True)} of {config.num_hidden_layers} layers": sparse.count(False) and not first,
        f"MLPs in {sparse.count(False)}": not whole,
    }
    clamped = "" if config.experts.swiglu_limit is None else "clamped "
    return ", ".join((f"{clamped}{gate}, experts", *(what for what, has in said.items() if has)))


def ends(config: ModelConfig) -> str:
    scale, head = config.embedding.scale, config.head
    said = {
        "embeddings times √E": scale == config.hidden_size**0.5,
        "embeddings times a multiplier": scale not in (1, config.hidden_size**0.5),
        "logits divided by another": head.logits_scaling != 1,
        f"logits within {head.soft_cap}": head.soft_cap is not None,
        "one table": head.tied,
        "a bias of logits": head.bias,
        "a dense layer and a norm before the head": head.transform,
        "a number times every layer's output": config.layers[0].scalar,
        "inputs per layer": config.embedding.layer_inputs is not None,
        f"{config.embedding.streams} residual streams": config.embedding.streams,
    }
    return "; ".join(what for what, has in said.items() if has)
