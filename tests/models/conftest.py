"""Tiny random-weight models of every family, made with transformers and saved once a session."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_families
from support.conformance import but_slow
from support.tiny_families import FAMILIES, WHOLE, odd
from support.tiny_sizes import SIZES


@dataclasses.dataclass(frozen=True)
class Reference:
    """A transformers model, and the folder it was saved to in float32."""

    name: str
    torch: Any
    folder: Path

    def logits(self, ids):
        """`[B, T]` to `[B, T, V]`, in numpy; of a model with running states token by token, as it decodes."""
        import torch

        if self.name in tiny_families.HYBRIDS:
            made, kept = [], None
            for at, tokens in enumerate(np.asarray(ids).T):
                logits, kept = self._step(tokens, at, kept)
                made.append(logits)
            return np.concatenate(made, axis=1)
        with torch.no_grad():
            return self.torch(torch.as_tensor(ids)).logits.float().numpy()

    def greedy(self, prompt, count):
        """The likeliest `count` tokens after a prompt, one after the other; a model with running states reads one at a time."""
        import torch

        if self.name not in tiny_families.HYBRIDS:
            ids, size = torch.as_tensor([prompt]), {"max_new_tokens": count, "min_new_tokens": count}
            asked = {
                "attention_mask": torch.ones_like(ids),
                "do_sample": False,
                "eos_token_id": None,
                "pad_token_id": 0,
            }
            return self.torch.generate(ids, **asked, **size)[0, len(prompt) :].tolist()
        text, kept = list(prompt), None
        for at in range(len(prompt) + count - 1):
            logits, kept = self._step(text[at : at + 1], at, kept)
            text += [int(logits.argmax())] if at >= len(prompt) - 1 else []
        return text[len(prompt) :]

    def _step(self, tokens, at, kept):
        """Logits `[B, 1, V]` after one more token per row at position `at`, and what the model keeps."""
        import torch

        tokens = torch.as_tensor(tokens)[:, None]
        with torch.no_grad():  # without positions, transformers counts the keys of the first layer, which may have none
            out = self.torch(tokens, position_ids=torch.full_like(tokens, at), cache=kept, use_cache=True)
        return out.logits.float().numpy(), out.cache


def build(name: str, folder: Path, **drawn: Any) -> Reference:
    """The model of a family, with the fields `drawn` instead of its own.

    Norms, biases and scalars are random too: transformers starts them at 1 and 0, which hides a loader that drops them."""
    import torch
    import transformers

    kind, options = FAMILIES[name] if name in FAMILIES else WHOLE[name]
    config = getattr(transformers, f"{kind}Config")(**((SIZES if name in FAMILIES else {}) | options | drawn))
    torch.manual_seed(len(name))
    head = "ForCausalLM" if name in FAMILIES else "ForConditionalGeneration"
    named = tiny_families.LM.get(kind, f"{kind.removesuffix('Text')}{head}")
    model = getattr(transformers, named, transformers.AutoModelForCausalLM.from_config)(config).eval()
    stored = {name for name, tensor in model.state_dict().items() if tensor.ndim == 1 or name.endswith("bias")}
    ones = (
        ()
        if kind in ("Gemma", "Gemma2", "Gemma3Text", "Nemotron", "Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText")
        else (
            "norm.weight",
            "norm_1.weight",
            "norm_2.weight",
            "ln_1.weight",
            "ln_2.weight",
            "ln_f.weight",
            "scalar",
            "scale",
        )
    )
    with torch.no_grad():  # norms of Gemma 1 to 3, Nemotron and Qwen3-Next are around 0: they scale by 1 more
        for parameter_name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter_name in stored:
                parameter.normal_(1.0 if parameter_name.endswith(ones) else 0.0, 0.3)
            elif parameter_name.endswith("modality_router.weight"):  # whose inputs are divided by their width
                parameter.mul_(parameter.shape[1])
    model.save_pretrained(folder)
    if kind == "KimiLinear":  # published files name MLPs of layers without experts as others do
        import safetensors.numpy

        arrays, inner = safetensors.numpy.load_file(folder / "model.safetensors"), ("gate_proj", "up_proj", "down_proj")
        dense = {f".block_sparse_moe.{name}": f".mlp.{name}" for name in inner}
        for name in list(arrays):
            found = next((old for old in dense if old in name), None)
            if found is not None:
                arrays[name.replace(found, dense[found])] = arrays.pop(name)
        safetensors.numpy.save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    if not hasattr(transformers, named):  # a Llama there; published files have a name of their own
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said | {"architectures": [named]}))
    return Reference(name, model, folder)


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """`references(name, **drawn)`: the model of that family, with other fields `drawn`, built at the first call."""
    made: dict[Any, Reference] = {}

    def get(name: str, **drawn: Any) -> Reference:
        key = name, str(drawn)
        if key not in made:
            made[key] = build(name, tmp_path_factory.mktemp(name) / name, **drawn)
        return made[key]

    return get


@pytest.fixture(scope="session", params=but_slow(FAMILIES, "starcoder2", "stablelm", "opt", "opt_350m", "nemotron"))
def reference(request, references) -> Reference:
    """Every family in turn."""
    return references(request.param)


@pytest.fixture
def oddly(tmp_path):
    """`oddly(name, seed)`: a model of that family with fields drawn by seed."""
    return lambda name, seed: build(name, tmp_path / f"{name}-{seed}", **odd(name, seed))
