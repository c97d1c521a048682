"""transformers as a peer, with its own speculative decoding."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.bench.options import BenchOptions
from specjax.bench.peers.folders import draft_of, target_folder, written

LOOKED_UP = 10
"""Tokens that transformers' prompt lookup proposes."""


@dataclasses.dataclass(frozen=True)
class TransformersPeer:
    """`transformers.generate` in static batches, padded on the left, with torch's default number of threads.

    Attributes:
      model: from `load`.
      batch_size: rows of a batch.
      how: further arguments of `generate`.
      seed: torch's seed, set whenever it is asked.
      eos: ids that end a text.
    """

    model: Any
    batch_size: int = 1
    how: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    eos: tuple[int, ...] = ()

    @staticmethod
    def load(folder: Path, dtype: str, eos: tuple[int, ...] = ()) -> Any:
        """The folder as a transformers model that stops only at these ids; other settings are arguments of `generate`.

        Raises:
          ValueError: if torch is not installed.
        """
        try:
            import torch
        except ImportError as error:
            raise ValueError("--peer transformers needs torch: pip install torch") from error
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.disable_progress_bar()  # a bar of the loaded tensors
        known: Any = {"dtype": getattr(torch, dtype), "trust_remote_code": False}  # a folder's own code is never run
        model = AutoModelForCausalLM.from_pretrained(folder, **known).eval()
        pad = model.generation_config.pad_token_id or 0
        model.generation_config = GenerationConfig(eos_token_id=list(eos) or None, pad_token_id=pad)
        return model

    def complete(self, requests: Sequence[Any]) -> list[list[int]]:
        """The new ids of requests with `ids` and `max_new_tokens`, in batches of `batch_size`."""
        import torch

        torch.manual_seed(self.seed)
        parts = [requests[i : i + self.batch_size] for i in range(0, len(requests), self.batch_size)]
        return [row for part in parts for row in self._complete(part, max(r.max_new_tokens for r in part))]

    def _complete(self, requests: Sequence[Any], count: int) -> list[list[int]]:
        import torch

        width = max(len(r.ids) for r in requests)
        ids = torch.tensor([[0] * (width - len(r.ids)) + list(r.ids) for r in requests])
        mask = torch.tensor([[0] * (width - len(r.ids)) + [1] * len(r.ids) for r in requests])
        how = {"do_sample": False, "use_cache": True, **self.how}
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=count, **how)
        rows = zip(out[:, width:].tolist(), requests, strict=True)
        return [ended(row[: request.max_new_tokens], self.eos) for row, request in rows]


def transformers_peers(options: BenchOptions, engines: Mapping[str, Any], longest: int) -> dict[str, TransformersPeer]:
    """The contestants of transformers by mode: plain and, at batch 1, with its prompt lookup and with an assistant
    model.

    The assistant is the draft model of our first engine with one.

    Raises:
      ValueError: if torch is not installed, or if transformers has no format for the model.
    """
    plain = next(iter(engines.values()))
    dtype, eos = plain.model.dtype.name, () if options.ignore_eos else plain.model.eos_ids
    with tempfile.TemporaryDirectory() as scratch:
        target = TransformersPeer.load(
            target_folder(plain, Path(scratch) / "target", options.widen is not None), dtype, eos
        )
        modes: dict[str, dict[str, Any]] = {"sampled" if options.temperature else "greedy": {}}
        if options.batch_size == 1:
            modes["prompt_lookup"] = {"prompt_lookup_num_tokens": LOOKED_UP}
            draft = next((draft for draft in map(draft_of, engines.values()) if draft is not None), None)
            if draft is not None:
                folder = written(*draft, Path(scratch) / "draft")
                modes["assisted"] = {"assistant_model": TransformersPeer.load(folder, dtype, eos)}
    asked = plain.filled({"temperature": options.temperature or None})
    drawn = {"do_sample": True, "top_k": 0, "top_p": 1.0} if options.temperature else {}
    return {
        mode: TransformersPeer(target, options.batch_size, drawn | asked | how, options.seed, eos)
        for mode, how in modes.items()
    }


def ended(tokens: list[int], eos: tuple[int, ...]) -> list[int]:
    """A row of a batch up to and including its end token, without the padding after it.

    >>> ended([5, 2, 0, 0], (2,))
    [5, 2]
    """
    found = [place for place, token in enumerate(tokens) if token in eos]
    return tokens[: found[0] + 1] if found else tokens
