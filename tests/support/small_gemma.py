"""A tiny DiffusionGemma of transformers' own, random in every weight, and the folder that it saves."""

import functools

import pytest

V, W, IMAGE = 48, 6, 47  # vocabulary, canvas, the token of an image


@functools.cache
def theirs():
    """The torch model: sliding and full layers with heads of their own, a vision part, and sharp predictions."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
        pytest.skip("needs a transformers with DiffusionGemma (5.23 has it): pip install -U transformers")
    text = transformers.DiffusionGemmaTextConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "full_attention"], num_experts=5, top_k_experts=2,
        moe_intermediate_size=12, max_position_embeddings=96, eos_token_id=1,
    )  # fmt: skip
    vision = transformers.Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, position_embedding_size=16,
    )  # fmt: skip
    config = transformers.DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=W, image_token_id=IMAGE
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            if tensor.is_floating_point() and "rotary" not in name and "embed_scale" not in name:
                tensor.add_(0.25 * torch.randn(tensor.shape, generator=generator))
        model.model.decoder.norm.weight.mul_(2.0)
        # self-conditioning is all that carries rounding from pass to pass: it must not grow on the way
        model.model.decoder.self_conditioning.down_proj.weight.mul_(0.1)
    return model


def saved(path):
    """The folder that transformers writes."""
    theirs().save_pretrained(path)
    return path
