"""PPD's published prompt tokens (hmarkc/parallel-prompt-decoding): a PEFT folder of a prompt tuning."""

from typing import Any

from specjax.draft.heads.layout import Layout, Reader, Sure, check_flags
from specjax.draft.ppd.trees import parse
from specjax.models.errors import ModelError
from specjax.models.fields import is_size

PAPER_TREES = "10 @ 3x11; 10 | 10 6 3 2 1x2 @ 3x3 2x8 3x3 2x7 3 2x12; 10 | 10 4 2 1x2 | 4 2 @ 3x3 2x8 3 2x23"
"""The trees with which the authors decode Vicuna 7B (their "105"), for three prompt tokens."""
_TREES = {1: "10 @ 1x11", 3: PAPER_TREES}
_PEFT = (
    "peft_type peft_version task_type inference_mode revision auto_mapping num_virtual_tokens token_dim num_layers "
    "num_transformer_submodules prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs"
).split()
_SERVED = {
    "num_exits": (1, None), "use_custom_lm_head": (False, None), "use_prefix_tuning": (False, None),
    "aggregation_type": ("mean", None),
}  # fmt: skip
"""Flags that change the prompt tokens' predictions, and the values that are supported."""


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of prompt tokens: `prompt_embeddings`, the members of a token's ensemble one after the other."""
    own = ("num_special_tokens", "virtual_tokens_per_special_token", "prefix_virtual_tokens", "vt_attention_type")
    check_flags(reader, config, *_PEFT, *_SERVED, *own)
    for flag, served in _SERVED.items():
        if config.get(flag) not in served:
            raise ModelError(
                f"{reader.file}: {flag} is {config[flag]!r}; only prompt tokens with {served[0]!r} are supported"
            )
    prompts, members = (config.get(key, 1) for key in own[:2])
    if not is_size(prompts) or not is_size(members):
        raise ModelError(f"{reader.file}: {own[0]} and {own[1]} must be numbers, not {prompts!r} and {members!r}")
    sees = str(config.get("vt_attention_type", "decoder"))
    if sees != "ensemble" and (members > 1 or sees != "decoder" and prompts > 1):
        raise ModelError(
            f"{reader.file}: vt_attention_type is {sees!r}; only prompt tokens that see no others than the earlier ones of "
            "their own ensemble are supported"
        )
    size = target.lm.config.hidden_size
    stored = reader.tensors.get("prompt_embeddings")
    if stored is not None and stored.ndim == 2 and stored.shape[1] != size:
        raise ModelError(
            f"{reader.folder}: prompt_embeddings are {stored.shape[1]} wide and {target.name!r} {size}: they belong to "
            "another target"
        )
    table = reader.take("prompt_embeddings", (prompts * members, size)).reshape(prompts, members, size)
    return {"trees": _trees(reader, prompts), "ensembles": members}, {"embeddings": table}


def _trees(reader: Reader, prompts: int) -> str:
    """The trees that the user chose, or the published ones."""
    chosen = reader.chosen.get("trees") or _TREES.get(prompts)
    if chosen is None:
        raise ModelError(
            f"{reader.file}: num_special_tokens is {prompts}, for which no trees were published: give trees=... for "
            f"{prompts} states"
        )
    states = len(parse(chosen)) - 1
    if states != prompts:
        raise ModelError(f"{reader.file}: num_special_tokens is {prompts}, and the trees are of {states} states")
    if "trees" not in reader.chosen:
        reader.notes.append(f"has {prompts} prompt tokens, and drafts the trees that were published for as many")
    return chosen


LAYOUT = Layout(
    read, said=lambda config: Sure.OWN if "num_special_tokens" in config else Sure.NO, stems=("adapter_model",)
)
