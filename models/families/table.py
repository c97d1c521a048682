"""The table of architectures: what is different in each is in its description, and `save` writes the first that can say what
a model is."""

from specjax.models import gemma_text
from specjax.models.families import glm, gpt_oss, granite, llama, mixtral, olmo, phi3, qwen, smollm3
from specjax.models.families.base import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.LLAMA,
    "mistral": llama.MISTRAL,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen.QWEN3_MOE,
    "mixtral": mixtral.MIXTRAL,
    "glm4_moe": glm.GLM4_MOE,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "smollm3": smollm3.SMOLLM3,
    "granite": granite.GRANITE,
    "granitemoehybrid": granite.GRANITE_4,
    "phi3": phi3.PHI3,
    **gemma_text.FAMILIES,
    "gpt_oss": gpt_oss.GPT_OSS,
}
"""By `model_type`."""
