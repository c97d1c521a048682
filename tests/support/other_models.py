"""Models of other libraries: the page's own ones, and Tunix's and the library gemma's, with small random weights."""

import importlib
import importlib.machinery
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models import hf_config

PAGE = Path(__file__).parents[2] / "docs/other_libraries.md"
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
FIELDS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_theta": 1e6},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "head_dim": None, "rope_theta": 1e6},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "rope_theta": 1e6,
    },
    "gemma": {"architectures": ["GemmaForCausalLM"], "num_key_value_heads": 1},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"], "sliding_window": 6, "query_pre_attn_scalar": 8, "num_hidden_layers": 7,
        "rope_local_base_freq": 1e4, "rope_theta": 1e6, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""By family; a base of 1,000,000 is the one that Tunix's Llama turns by."""
OF_TUNIX = [family for family in FIELDS if family != "qwen3_moe"]  # whose experts Tunix computes on TPUs


def config_of(family, **fields):
    """The config of a small model of a family."""
    return hf_config.from_hf(SIZES | {"model_type": family} | FIELDS[family] | fields)


def drawn(tree, scale=0.3):
    """The tree with random numbers in every array, around those that it has; zeros of kernels hide what reads them."""
    leaves, form = jax.tree.flatten(tree)
    rng = np.random.default_rng(0)
    return form.unflatten([x + jnp.asarray(scale * rng.normal(size=x.shape), x.dtype) for x in leaves])


def of_page(library):
    """`net`, `lm`, `params` and all other names of the page's block for a library, without its runs."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    block = next(block for block in blocks if f"{library}\n" in block and "class Net(" in block)
    names: dict = {"__name__": "page"}
    exec(compile(block[: block.index("records =")], PAGE.name, "exec"), names)
    return names


def tunix_net(family):
    """A module of Tunix and its config.

    Tunix's own `__init__`, which imports its trainers and what they need, is left out."""
    spec = importlib.machinery.PathFinder.find_spec("tunix")
    if spec is None:
        pytest.skip("google-tunix is not installed: pip install 'specjax[tunix]'")
    if "tunix" not in sys.modules:
        sys.modules["tunix"] = types.ModuleType("tunix")
        sys.modules["tunix"].__path__ = list(spec.submodule_search_locations or ())
    named = {"llama": ("llama3", "Llama3"), "gemma2": ("gemma", "Gemma"), "gemma3_text": ("gemma3", "Gemma3")}
    module, kind = named.get(family, (family, family.capitalize()))
    model = pytest.importorskip(
        f"tunix.models.{module}.model", reason="Tunix lacks a package: pip install 'specjax[tunix]'"
    )
    config = config_of(family)
    own = config.near
    sizes = {
        "num_layers": config.num_hidden_layers, "embed_dim": config.hidden_size, "head_dim": own.head_dim,
        "hidden_dim": config.dense.intermediate_size, "num_heads": own.num_attention_heads,
        "num_kv_heads": own.num_key_value_heads,
    }  # fmt: skip
    if family.startswith("gemma"):
        sizes |= {"num_embed": config.vocab_size, "sliding_window_size": own.window}
    else:
        sizes |= {"vocab_size": config.vocab_size, "rope_theta": 1_000_000, "norm_eps": config.norm.eps}
        sizes |= {"weight_tying" if family == "llama" else "use_tied_embedding": config.head.tied}
    if family in ("gemma", "gemma2"):
        kinds = model.AttentionType
        types_ = [kinds.GLOBAL if config.window(i) is None else kinds.LOCAL_SLIDING for i in range(len(config.layers))]
        sizes |= {
            "attention_types": types_, "use_post_attn_norm": family == "gemma2", "use_post_ffw_norm": family == "gemma2",
            "attn_logits_soft_cap": own.soft_cap, "final_logit_softcap": config.head.soft_cap,
        }  # fmt: skip
    if family == "gemma3_text":
        sizes |= {"global_base_frequency": 1_000_000, "param_dtype": jnp.float32}
    return config, getattr(model, kind)(model.ModelConfig(**sizes), rngs=nnx.Rngs(0))


def tunix(family):
    """The config of a module of Tunix, its parameters, and its logits `[B, T, V]` of parameters and tokens `[B, T]`."""
    config, net = tunix_net(family)
    graph, params = nnx.split(net)

    def forward(params, tokens):
        rows, count = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(count), (rows, count))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (rows, count, count))
        return nnx.merge(graph, params)(tokens, positions, None, mask)[0]

    return config, drawn(params), forward


def gemma(family):
    """The same of the library `gemma`."""
    nn = pytest.importorskip("gemma.gm.nn", reason="the library gemma is not installed: pip install gemma")
    try:
        from gemma.gm.nn import _config, _modules
    except ImportError as error:
        pytest.skip(f"a package that the library gemma needs is missing ({error}): pip install gemma")
    config = config_of(family)
    near, local = config.near, _modules.AttentionType.LOCAL_SLIDING
    kinds = [_modules.AttentionType.GLOBAL if config.window(i) is None else local for i in range(len(config.layers))]
    far = next(own for own in config.attentions if own.window is None)
    own = _config.TransformerConfig(
        num_embed=config.vocab_size, embed_dim=config.hidden_size, hidden_dim=config.dense.intermediate_size,
        num_heads=near.num_attention_heads, head_dim=near.head_dim, num_kv_heads=near.num_key_value_heads,
        final_logit_softcap=config.head.soft_cap, use_post_attn_norm=True, use_post_ffw_norm=True, attention_types=kinds,
        attn_logits_soft_cap=near.soft_cap, sliding_window_size=near.window, transpose_gating_einsum=family == "gemma3_text",
        use_qk_norm=near.qk_norm is not None, local_base_frequency=int(near.rope.theta),
        global_base_frequency=int(far.rope.theta),
    )  # fmt: skip
    net = nn.Transformer(config=own, dtype=jnp.float32)
    params = net.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    forward = lambda params, tokens: net.apply(params, tokens).logits
    return config, drawn(params), forward
