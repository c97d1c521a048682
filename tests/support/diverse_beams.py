"""Diverse beam search of transformers 4: `python tests/support/diverse_beams.py` writes `tests/search/diverse_beams.json`.

Transformers 5 has no groups of beams any more, so this runs where 4.51 is installed beside this package:
`pip install --target FOLDER transformers==4.51.3`, and FOLDER first on PYTHONPATH.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "search/diverse_beams.json"
FAMILIES = ("math", "edit", "lists", "json")
NEW = 24
OPTIONS: tuple[dict[str, Any], ...] = (
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {
        "num_beams": 6,
        "num_beam_groups": 3,
        "diversity_penalty": 1.0,
        "early_stopping": True,
        "length_penalty": 0.7,
    },
    {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 0.3, "early_stopping": "never"},
)


def prompts(tokenizer: Any) -> list[list[int]]:
    """Twenty questions as token ids, families in turn."""
    from specjax import tasks
    from specjax.tasks.chat import render

    asked = zip(*(tasks.generate(family, 1, seed=3, count=5) for family in FAMILIES), strict=True)
    texts = [render(tasks.messages(question)) for five in asked for question in five]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def found_by(model: Any, prompts: list[list[int]], **options: Any) -> list[list[tuple[list[int], float]]]:
    """What a transformers model finds in one batch: new tokens, EOS included, and score, of every prompt the best first."""
    import torch

    width, count = max(map(len, prompts)), options["num_beams"]
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            num_return_sequences=count,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    eos = model.generation_config.eos_token_id
    texts = [row[: row.index(eos) + 1] if eos in row else row for row in found.sequences[:, width:].tolist()]
    pairs = list(zip(texts, found.sequences_scores.tolist(), strict=True))
    return [pairs[at : at + count] for at in range(0, len(pairs), count)]


def main() -> None:
    """Writes the file."""
    import torch
    import transformers

    from specjax import models

    folder = models.shipped()["tiny"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    asked = prompts(models.load("tiny").tokenizer)
    runs = [{"options": own, "found": found_by(model, asked, max_new_tokens=NEW, **own)} for own in OPTIONS]
    content = {"transformers": transformers.__version__, "new": NEW, "runs": runs}
    FILE.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
