"""llama.cpp as a peer: llama-cpp-python reads our weights from a GGUF file; inputs and outputs are token ids."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.bench.options import BenchOptions
from specjax.bench.peers.folders import draft_of, target_folder, written
from specjax.models.tensors import read_folder
from specjax.terminal import note

LOOKED_UP, DRAFTED = 10, 4
"""Tokens proposed by its prompt lookup (the default of its class), and by our wrapper of a draft model."""
SPARE = 64
"""Slots beyond the longest text, for proposals that reach beyond it."""
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
NEEDS = "--peer llama.cpp needs its packages: pip install 'specjax[peers]' (which builds llama.cpp, for some minutes)"

CRASHES = (
    "it dies there, as it does after a build with GCC 12.2, whose AMX code is wrong. "
    'CXXFLAGS="-fno-tree-dse -fno-dse" pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python mends it'
)


def write_gguf(folder: Path, file: Path) -> None:
    """Writes a Hugging Face folder's weights as a float32 GGUF file with a placeholder tokenizer.

    Raises:
      ValueError: if gguf is not installed, or for a model that is not of the families Llama, Qwen2 and Qwen3.
    """
    try:
        import gguf
    except ImportError as error:
        raise ValueError(NEEDS) from error
    config = json.loads((folder / "config.json").read_text())
    name = (config.get("architectures") or ["?"])[0]
    if name not in ARCHITECTURES:
        raise ValueError(f"--peer llama.cpp takes models of {', '.join(ARCHITECTURES)}, not {name}")
    if config.get("rope_scaling") or config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ValueError("--peer llama.cpp takes models without scaled ropes or sliding windows")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads", heads)
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(file), ARCHITECTURES[name])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")  # it needs one: these names are placeholders
    writer.add_token_list([f"token {i}" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, ARCHITECTURES[name].upper()), layers)
    for source, stored in read_folder(folder).items():
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"--peer llama.cpp has no name for the tensor {source}")
        tensor = stored.array()
        if name == "LlamaForCausalLM" and source.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, heads if "q_proj" in source else kv_heads)
        writer.add_tensor(target, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fails(file: Path) -> str:
    """Why llama.cpp writes no token from a file, tried in a process of its own; empty if it does."""
    code = "import sys, llama_cpp; next(llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False).generate([1, 2, 3]))"
    done = subprocess.run([sys.executable, "-P", "-c", code, str(file)], capture_output=True)
    if done.returncode < 0:
        return CRASHES
    said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
    return said[0] if done.returncode else ""


def interleaved(kernel: np.ndarray, heads: int) -> np.ndarray:
    """Rows `[H * D, E]` of a kernel, reordered from a rope over halves of a head to a rope over neighbours.

    >>> interleaved(np.arange(4)[:, None], 1)[:, 0].tolist()
    [0, 2, 1, 3]
    """
    halves = kernel.reshape(heads, 2, kernel.shape[0] // heads // 2, *kernel.shape[1:])
    return halves.swapaxes(1, 2).reshape(kernel.shape)


@dataclasses.dataclass(frozen=True)
class LlamaCppPeer:
    """`llama_cpp.Llama.generate`, one text at a time: the package does not decode batches.

    Attributes:
      llama: the generating `llama_cpp.Llama`.
      how: the sampler's settings.
      eos: ids that end a text.
      draft: the `llama_cpp.Llama` that drafts for it; None if none does.
    """

    llama: Any
    how: Mapping[str, float]
    eos: tuple[int, ...] = ()
    draft: Any = None

    def complete(self, requests: Sequence[Any]) -> list[list[int]]:
        """The new ids of requests with `ids` and `max_new_tokens`."""
        return [list(itertools.islice(self._complete(r), r.max_new_tokens)) for r in requests]

    def _complete(self, request: Any) -> Iterator[int]:
        for llama in (self.llama, self.draft):  # else a prompt like the last one would be prefilled for free
            if llama is not None:
                llama.reset()
        for token in self.llama.generate(list(request.ids), **self.how):
            yield token
            if token in self.eos:
                return


def llama_cpp_peers(options: BenchOptions, engines: Mapping[str, Any], longest: int) -> dict[str, LlamaCppPeer]:
    """The contestants of llama.cpp by mode: plain, with the package's prompt lookup, with a draft model, and from the
    model's own file, if it is a GGUF file.

    The draft model is that of our first engine with one, in our own wrapper, since the package has none. All but the last
    read float32 weights.

    Raises:
      ValueError: if its packages are not installed, on a type other than float32, or on a model that it does not know.
    """
    plain = next(iter(engines.values()))
    if plain.model.dtype.name != "float32":
        raise ValueError(f"--peer llama.cpp compares in float32, not {plain.model.dtype.name}: add --dtype float32")
    try:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
    except ImportError as error:
        raise ValueError(NEEDS) from error

    slots = SPARE + longest
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    def read(file: Path, drafts: Any = None) -> Any:
        return Llama(
            str(file), n_ctx=slots, n_threads=threads, n_threads_batch=threads, use_mmap=False, verbose=False,
            seed=options.seed, draft_model=drafts, logits_all=drafts is not None,  # else only for a batch's rows
        )  # fmt: skip

    def load(folder: Path, drafts: Any = None) -> Any:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "model.gguf"
            write_gguf(folder, file)
            return read(file, drafts)

    class SecondLlama(LlamaDraftModel):
        """Drafts the model's greedy continuation; its cache keeps the text read so far until the next text."""

        def __init__(self, llama: Any):
            self.llama = llama

        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            ids = input_ids.tolist()
            return np.fromiter(itertools.islice(self.llama.generate(ids, temp=0.0), DRAFTED), np.intc)

    with tempfile.TemporaryDirectory() as scratch:
        folder = target_folder(plain, Path(scratch) / "target", options.widen is not None)
        modes = {
            "sampled" if options.temperature else "greedy": (load(folder), None),
            "prompt_lookup": (load(folder, LlamaPromptLookupDecoding(num_pred_tokens=LOOKED_UP)), None),
        }
        draft = next((draft for draft in map(draft_of, engines.values()) if draft is not None), None)
        if draft is not None:
            second = load(written(*draft, Path(scratch) / "draft"))
            modes["draft (our wrapper)"] = (load(folder, SecondLlama(second)), second)
    own = plain.model.path
    if options.widen is None and own is not None and own.suffix == ".gguf":
        if why := fails(own):
            note(f"left out llama.cpp on {own.name}: {why}")
        else:
            modes[f"{next(iter(modes))}, the file as stored"] = (read(own), None)
    asked = plain.filled({"temperature": options.temperature or None})
    how = {"temp": asked.get("temperature", 0.0), "repeat_penalty": asked.get("repetition_penalty", 1.0)}
    how |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | {n: asked[n] for n in ("top_k", "top_p", "min_p") if n in asked}
    eos = () if options.ignore_eos else plain.model.eos_ids
    return {mode: LlamaCppPeer(llama, how, eos, second) for mode, (llama, second) in modes.items()}
