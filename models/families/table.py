"""The architectures that are read and written, one line per family.

`save` writes a model without a family as the first of these that can express it."""
# isort: skip_file

from specjax.models.families.base import Family
from specjax.models.families.llama import LLAMA as LLAMA
from specjax.models.families.llama import MISTRAL as MISTRAL
from specjax.models.families.qwen import QWEN2 as QWEN2
from specjax.models.families.qwen import QWEN2_MOE as QWEN2_MOE
from specjax.models.families.qwen import QWEN3 as QWEN3
from specjax.models.families.qwen import QWEN3_MOE as QWEN3_MOE
from specjax.models.families.qwen_next import QWEN3_NEXT as QWEN3_NEXT
from specjax.models.families.qwen_next import QWEN3_5 as QWEN3_5
from specjax.models.families.qwen_next import QWEN3_5_MOE as QWEN3_5_MOE
from specjax.models.families.kimi import KIMI_LINEAR as KIMI_LINEAR
from specjax.models.families.mixtral import MIXTRAL as MIXTRAL
from specjax.models.families.glm import GLM4_MOE as GLM4_MOE
from specjax.models.families.glm import DOTS1 as DOTS1
from specjax.models.families.deepseek import DEEPSEEK_V2 as DEEPSEEK_V2
from specjax.models.families.deepseek import DEEPSEEK_V3 as DEEPSEEK_V3
from specjax.models.families.deepseek import GLM_4_LITE as GLM_4_LITE
from specjax.models.families.minimax import MINIMAX_M2 as MINIMAX_M2
from specjax.models.families.minimax import MINIMAX_01 as MINIMAX_01
from specjax.models.families.mimo import MIMO_V2 as MIMO_V2
from specjax.models.families.ernie import ERNIE as ERNIE
from specjax.models.families.ernie import ERNIE_MOE as ERNIE_MOE
from specjax.models.families.ling import LING_2 as LING_2
from specjax.models.families.olmo import OLMOE as OLMOE
from specjax.models.families.olmo import OLMO2 as OLMO2
from specjax.models.families.olmo import OLMO3 as OLMO3
from specjax.models.families.smollm3 import SMOLLM3 as SMOLLM3
from specjax.models.families.granite import GRANITE as GRANITE
from specjax.models.families.granite import GRANITE_MOE as GRANITE_MOE
from specjax.models.families.granite import GRANITE_4 as GRANITE_4
from specjax.models.families.phi3 import PHI3 as PHI3
from specjax.models.families.phimoe import PHIMOE as PHIMOE
from specjax.models.families.seed_oss import SEED_OSS as SEED_OSS
from specjax.models.families.apertus import APERTUS as APERTUS
from specjax.models.families.arcee import ARCEE as ARCEE
from specjax.models.families.cohere import COHERE as COHERE
from specjax.models.families.cohere import COHERE_2 as COHERE_2
from specjax.models.families.exaone import EXAONE_4 as EXAONE_4
from specjax.models.families.hunyuan import HUNYUAN as HUNYUAN
from specjax.models.families.ministral import MINISTRAL_3 as MINISTRAL_3
from specjax.models.families.glm_dense import GLM as GLM
from specjax.models.families.glm_dense import GLM_0414 as GLM_0414
from specjax.models.families.llama4 import LLAMA_4 as LLAMA_4
from specjax.models.families.internlm import INTERNLM_3 as INTERNLM_3
from specjax.models.families.gemma import GEMMA as GEMMA
from specjax.models.families.gpt_neox import GPT_NEOX as GPT_NEOX
from specjax.models.families.phi import PHI as PHI
from specjax.models.families.gpt2 import GPT2 as GPT2
from specjax.models.families.starcoder2 import STARCODER2 as STARCODER2
from specjax.models.families.stablelm import STABLELM as STABLELM
from specjax.models.families.opt import OPT as OPT
from specjax.models.families.nemotron import NEMOTRON as NEMOTRON
from specjax.models.families.lfm2 import LFM2 as LFM2
from specjax.models.families.lfm2 import LFM2_MOE as LFM2_MOE
from specjax.models.families.modernbert import MODERNBERT as MODERNBERT
from specjax.models.families.mamba import MAMBA as MAMBA
from specjax.models.families.mamba import FALCON_MAMBA as FALCON_MAMBA
from specjax.models.families.mamba import MAMBA_2 as MAMBA_2
from specjax.models.families.jamba import JAMBA as JAMBA
from specjax.models.families.jamba import BAMBA as BAMBA
from specjax.models.families.falcon_h1 import FALCON_H1 as FALCON_H1
from specjax.models.families.nemotron_h import NEMOTRON_H as NEMOTRON_H
from specjax.models.gemma_text import GEMMA2 as GEMMA2
from specjax.models.gemma_text import GEMMA3 as GEMMA3
from specjax.models.gemma_text import GEMMA3N as GEMMA3N
from specjax.models.gemma_text import GEMMA4 as GEMMA4
from specjax.models.families.gpt_oss import GPT_OSS as GPT_OSS
from specjax.models.families.t5 import T5 as T5
from specjax.models.families.t5 import MT5 as MT5
from specjax.models.families.bart import BART as BART
from specjax.models.families.bart import MBART as MBART
from specjax.models.families.bart import MARIAN as MARIAN
from specjax.models.families.bart import WHISPER as WHISPER
from specjax.models.families.minicpm import MINICPM as MINICPM

FAMILIES: dict[str, Family] = {one.model_type: one for one in list(globals().values()) if isinstance(one, Family)}
"""The families by `model_type`."""
