"""Latent attention: what a cache holds, published sizes, texts of transformers on meshes and in eight bits, float8 files.

Logits, folders and texts of its families are compared beside those of the others.
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import MODELS

import specjax
from specjax import models
from specjax.lm import Block, Wants
from specjax.models import LatentAttentionConfig, LlamaLM, hf_config
from specjax.models.caches.ems import EMS
from specjax.models.published_configs import CONFIGS
from specjax.serve.engine import Engine
from specjax.sharding import make_mesh

safetensors = pytest.importorskip("safetensors.numpy")

PROMPTS = ([5, 9, 11, 5, 9, 4], [7, 3, 7], [9])
NEW = 40


@pytest.mark.parametrize(
    ("name", "billions", "per_token", "sharper"),
    (
        ("deepseek-ai/DeepSeek-V2-Lite", 15.71, 31_104, 1.58963),
        ("deepseek-ai/DeepSeek-V3", 671.03, 70_272, 1.87385),
        ("moonshotai/Kimi-K2-Instruct", 1026.4, 70_272, 1.81326),
        ("zai-org/GLM-4.7-Flash", 29.94, 54_144, 1.0),
    ),
)
def test_published_sizes(name, billions, per_token, sharper):
    """Parameters as transformers' classes count them, 576 numbers for each token and layer, and the factor of scores."""
    lm = LlamaLM(hf_config.from_hf(CONFIGS[name]))
    count = sum(x.size for x in jax.tree.leaves(lm.abstract()))
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)
    cache = jax.eval_shape(lambda: lm.init_cache(1, 100, jnp.bfloat16))
    assert {x.shape for x in jax.tree.leaves(cache)} == {(1, 1, 100, 576)} and set(cache.value) == {None}
    assert sum(x.size * 2 for x in jax.tree.leaves(cache)) == 100 * per_token
    mixer = lm.config.layers[0].mixer
    assert mixer.scores_scale * mixer.qk_head_dim**0.5 == pytest.approx(sharper, rel=1e-5)
    eight = jax.eval_shape(lambda: lm.init_cache(1, 100, jnp.int8)).key[0]
    assert eight.scale.shape == (1, 9, 100)


def test_caches_that_forget_are_for_other_attention():
    lm = LlamaLM(hf_config.from_hf(CONFIGS["deepseek-ai/DeepSeek-V2-Lite"]))
    with pytest.raises(ValueError, match="the cache EMS forgets, .* this model has layers without plain attention"):
        dataclasses.replace(lm, old=EMS(4, 4, budget=8), ahead=16)


@pytest.mark.slow
@pytest.mark.covers("deepseek_v3")
def test_without_a_rope_positions_do_not_matter():
    plain = MODELS["latent"].config
    params = LlamaLM(plain).init(jax.random.key(0))
    far, logits = jnp.asarray([[0, 9, 2, 40, 7]]), {}
    for config in (plain, plain.every(LatentAttentionConfig, rope=None)):
        for positions in (jnp.arange(5)[None], far):
            block = Block(jnp.asarray([[3, 4, 5, 6, 7]]), positions, jnp.zeros((1,), jnp.int32))
            found = LlamaLM(config)(params, block, None, wants=Wants(logits=True)).logits
            logits.setdefault(config is plain, []).append(np.asarray(found))
    np.testing.assert_array_equal(*logits[False])
    assert np.abs(logits[True][0] - logits[True][1]).max() > 1e-3


def texts(model, line):
    """Greedy texts of all prompts in one batch."""
    engine = Engine(model, drafter=line)
    asked = [engine.request(prompt, max_new_tokens=NEW, temperature=0) for prompt in PROMPTS]
    found = {str(record.prompt): record.tokens for record in engine.run(asked, batch_size=len(PROMPTS))}
    return [list(found[str(request.prompt)]) for request in asked]


@pytest.mark.slow
@pytest.mark.covers("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
@pytest.mark.parametrize("name", ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite"))
def test_texts_of_transformers(references, name):
    """Of a ragged batch, with trees; of one family also on a mesh that splits heads, whose chips have copies of the vectors."""
    import torch

    reference, wanted = references(name), []
    for prompt in PROMPTS:
        out = reference.torch.generate(torch.as_tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        wanted.append(out[0, len(prompt) :].tolist())
    model = specjax.models.load(reference.folder, dtype="float32")
    assert texts(model, "token_recycling") == wanted
    if name == "deepseek_v3":
        mesh = make_mesh("model=2", jax.devices()[:2])
        split = specjax.models.load(reference.folder, dtype="float32", mesh=mesh)
        assert split.lm.kv_copies == 2 and texts(split, "token_recycling") == wanted


@pytest.mark.slow
@pytest.mark.covers("deepseek_v3")
def test_texts_of_a_cache_of_eight_bits(references):
    """A tree and plain decoding read the same vectors; they are near those of float32."""
    model = models.load(references("deepseek_v3").folder, dtype="float32")
    kept = dataclasses.replace(model, lm=dataclasses.replace(model.lm, cache_dtype="int8"))
    assert texts(kept, "token_recycling") == texts(kept, "none")


@pytest.mark.slow
@pytest.mark.covers("deepseek_v3")
def test_float8_blocks_are_read(references, tmp_path):
    """In the two-part matrix of keys and values, and where rows are turned, too."""
    folder = references("deepseek_v3").folder
    plain, packed = safetensors.load_file(folder / "model.safetensors"), {}
    rounded = dict(plain)
    for name, x in plain.items():
        if "_proj" not in name or not name.endswith("weight"):
            packed[name] = x
            continue
        rows, columns = (-(-size // 8) for size in x.shape)
        padded = np.zeros((rows * 8, columns * 8), np.float32)
        padded[: x.shape[0], : x.shape[1]] = x
        blocks = padded.reshape(rows, 8, columns, 8)
        scale = np.maximum(np.abs(blocks).max(axis=(1, 3)) / 448, 1e-9).astype(np.float32)
        codes = (blocks / scale[:, None, :, None]).astype(jnp.float8_e4m3fn)
        whole = (codes.astype(np.float32) * scale[:, None, :, None]).reshape(padded.shape)
        rounded[name] = np.ascontiguousarray(whole[: x.shape[0], : x.shape[1]])
        packed[name] = np.ascontiguousarray(codes.reshape(padded.shape)[: x.shape[0], : x.shape[1]])
        packed[name.removesuffix("weight") + "weight_scale_inv"] = scale
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}}
    made = []
    for part, arrays, more in (("packed", packed, said), ("rounded", rounded, {})):
        copy = shutil.copytree(folder, tmp_path / part)
        safetensors.save_file(arrays, copy / "model.safetensors")
        config = json.loads((copy / "config.json").read_text()) | more
        (copy / "config.json").write_text(json.dumps(config))
        made.append(models.load(copy, dtype="float32"))
    assert made[0].lm == made[1].lm
    for one, other in zip(*(jax.tree.leaves(model.params) for model in made), strict=True):
        np.testing.assert_array_equal(one, other)
