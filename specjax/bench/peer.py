"""Other libraries over the same folder of weights."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from specjax.bench.run import Ids, Lap

MODES = {"greedy": {}, "prompt_lookup": {"prompt_lookup_num_tokens": 10}}


@dataclasses.dataclass(frozen=True)
class TransformersPeer:
    """`transformers.generate`, greedy, at batch 1, with torch's default number of threads.

    Attributes:
      model: from `load`.
      mode: a key of `MODES`.
      prompts: token ids.
      max_new_tokens: exactly so many are made, EOS or not.
    """

    model: Any
    mode: str
    prompts: list[Ids]
    max_new_tokens: int

    @staticmethod
    def load(folder: Path, dtype: str) -> Any:
        """The folder as a transformers model that never stops at EOS.

        Raises:
          ValueError: when torch is not installed.
        """
        try:
            import torch
        except ImportError as error:
            raise ValueError("--peer transformers needs torch: pip install torch") from error
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # a bar of the loaded tensors
        known: Any = {"dtype": getattr(torch, dtype), "trust_remote_code": False}  # a folder's own code is never run
        model = AutoModelForCausalLM.from_pretrained(folder, **known).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = model.generation_config.pad_token_id or 0
        return model

    def warm(self) -> None:
        self._complete(self.prompts[0])

    def lap(self) -> Lap:
        began = time.perf_counter()
        tokens = [self._complete(prompt) for prompt in self.prompts]
        return Lap(tokens, time.perf_counter() - began)

    def _complete(self, prompt: Ids) -> list[int]:
        import torch

        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True,
                max_new_tokens=self.max_new_tokens, **MODES[self.mode],
            )  # fmt: skip
        return out[0, len(prompt) :].tolist()
