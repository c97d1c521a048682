"""Trains a model from `config.toml` and writes its folder; goes on from its checkpoint where there is one.

python -m experiments.pretrain.train target --work FOLDER

and so on, a section of the recipe a run: `target`, `stretch` and `polish`, then `draft` and `diffusion`; or `hybrid`.

`torchrun --nproc-per-node 2 -m experiments.pretrain.train ...` shares the batches of every update among processes of one thread
each, which on a few cores is faster than one process of several threads; the updates are the same, up to the order of sums.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import time
import tomllib

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tqdm import tqdm

from experiments.pretrain import tokenizer as words
from experiments.pretrain.data import Pools, shares
from experiments.pretrain.induction import induce
from experiments.pretrain.model import Model, load, save
from experiments.pretrain.muon import Optimizer
from experiments.pretrain.objectives import Diffusion, Draft, Probe, Target
from specjax.models import AttentionConfig, ModelConfig, llama_config
from specjax.models.states.short_conv import ShortConvConfig
from specjax.tasks import FAMILIES

HERE = pathlib.Path(__file__).resolve().parent
SHIPPED = HERE.parent.parent / "specjax" / "models" / "pretrained"


def rate_at(recipe: dict, step: int, spent: float) -> float:
    """Warm-up by steps, then flat, then as 1 - sqrt to 0 at the end of the run."""
    warm = min(1.0, (step + 1) / recipe["warmup_steps"])
    gone = max(0.0, spent - recipe["decay_from"]) / (1.0 - recipe["decay_from"])
    return warm * (1.0 - min(1.0, gone) ** 0.5)


def shape_of(recipe: dict, vocab_size: int) -> ModelConfig:
    sizes = {name: value for name, value in recipe["model"].items() if name != "convolutions"}
    plain = llama_config(vocab_size=vocab_size, tie_word_embeddings=True, **sizes)
    own, convolutions = plain.every(AttentionConfig, qk_norm=plain.norm), recipe["model"].get("convolutions", ())
    short = lambda layer: dataclasses.replace(layer, mixer=ShortConvConfig())
    return own.each(lambda i, layer: short(layer) if i in convolutions else layer)


def folder_of(
    folder: pathlib.Path, model: Model, tokenizer: Tokenizer, ids: dict[str, int], usual: dict[str, str]
) -> None:
    """Writes a folder that `specjax` and `transformers` read; `usual` is how it is decoded where the user does not say."""
    special = {"eos_token_id": ids["end"], "pad_token_id": ids["pad"]}
    words.save(tokenizer, folder, model.shape.max_position_embeddings)
    save(model, folder, special, ids["mask"])
    if model.causal or usual:
        (folder / "generation_config.json").write_text(json.dumps(special | usual, indent=2) + "\n")


class Run:
    """A model, its optimiser and how far it is.

    Args:
      recipe: a section of `config.toml` with `vocab_size`.
      objective: what it learns.
      checkpoint: where the run is kept.
      begin: a folder whose weights it starts from; None: at random.
      compiled: whether torch compiles the loss, which takes minutes and pays after some pools.
    """

    def __init__(
        self,
        recipe: dict,
        objective: Target,
        checkpoint: pathlib.Path,
        begin: pathlib.Path | None = None,
        compiled: bool = True,
    ):
        self.recipe, self.objective, self.checkpoint = recipe, objective, checkpoint
        self.model = Model(shape_of(recipe, recipe["vocab_size"]), objective.causal)
        self.model.start(recipe["seed"])
        if begin is not None:
            load(self.model, begin)
        elif recipe["induction"]:
            induce(self.model, recipe["seed"])
        self.optimizer = Optimizer(self.model, recipe)
        self.pool, self.step, self.tokens, self.cpu_s = 0, 0, 0, 0.0
        self.rank, self.processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            self.model.load_state_dict(saved["model"])
            self.optimizer.restore(saved["optimizer"])
            self.pool, self.step, self.tokens, self.cpu_s = (
                saved[name] for name in ("pool", "step", "tokens", "cpu_s")
            )
        self.lost = torch.compile(self._lost, dynamic=True) if compiled else self._lost

    def _lost(self, *arrays: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.objective.lost(self.model, *arrays)

    def learn(self, pools: Pools) -> float:
        """One pool of questions; the mean loss."""
        recipe, spent = self.recipe, self.pool / self.recipe["pools"]
        start = time.process_time()
        totals = torch.zeros(2)
        for index, batches in enumerate(pools.updates(self.pool)):
            sums = torch.zeros(2)
            for j in shares(batches, self.processes)[self.rank]:
                rng = np.random.default_rng((recipe["seed"], self.pool, 2, index, j))
                arrays = self.objective.arrays(batches[j], rng)
                loss = self.lost(*arrays)
                loss.backward()
                sums += torch.tensor([loss.item(), self.objective.weight(arrays)])
            self._share(sums)
            totals += sums
            self.optimizer.step(rate_at(recipe, self.step, spent))
            self.step += 1
            self.tokens += sum(int(batch.lengths.sum()) for batch in batches)
        self.pool += 1
        self.cpu_s += self.processes * (time.process_time() - start)
        return float(totals[0] / totals[1])

    def _share(self, sums: torch.Tensor) -> None:
        """Gradients of all processes' batches, over what these count for; `sums` becomes that of all as well."""
        for param in self.optimizer.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        if self.processes > 1:
            flat = torch.cat([param.grad.flatten() for param in self.optimizer.params] + [sums])
            dist.all_reduce(flat)
            *grads, all_sums = flat.split([param.numel() for param in self.optimizer.params] + [2])
            sums.copy_(all_sums)
            for param, grad in zip(self.optimizer.params, grads, strict=True):
                param.grad.copy_(grad.view_as(param))
        for param in self.optimizer.params:
            param.grad /= sums[1]

    def keep(self) -> None:
        """Everything the run needs to go on, in one file that is replaced whole."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state()}
        state |= {"pool": self.pool, "step": self.step, "tokens": self.tokens, "cpu_s": self.cpu_s}
        torch.save(state, self.checkpoint.with_suffix(".new"))
        os.replace(self.checkpoint.with_suffix(".new"), self.checkpoint)


def objective_of(recipe: dict, sections: dict, ids: dict[str, int], shipped: pathlib.Path) -> Target:
    if recipe["learns"] == "masks":
        return Diffusion(recipe, ids)
    if recipe["learns"] == "text":
        return Target(recipe, ids)
    teacher = Model(shape_of(sections["target"], recipe["vocab_size"]))
    load(teacher, shipped / sections["target"]["name"])
    return Draft(recipe, ids, teacher.requires_grad_(False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a section of the recipe")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="checkpoints and logs")
    parser.add_argument("--export", type=pathlib.Path, default=SHIPPED, help="model folders")
    parser.add_argument("--config", type=pathlib.Path, default=HERE / "config.toml")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    sections = tomllib.loads(args.config.read_text())
    args.work.mkdir(parents=True, exist_ok=True)
    file = args.work / "tokenizer.json"
    if not file.exists():
        words.train(**sections["tokenizer"]).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    ids = {name: tokenizer.token_to_id(text) for name, text in words.SPECIAL.items()}
    if args.model not in sections or args.model == "tokenizer":
        parser.error(f"no section {args.model!r}: there are {', '.join(list(sections)[1:])}")
    recipe = sections[args.model] | {"vocab_size": tokenizer.get_vocab_size()}
    recipe = {name: sections["target"][name] for name in ("parts", "model")} | recipe
    begin = args.export / recipe["begin"] if "begin" in recipe else None
    objective = objective_of(recipe, sections, ids, args.export)
    run = Run(recipe, objective, args.work / f"{args.model}.pt", begin)
    pools = Pools(recipe, tokenizer, ids["pad"], first_word=ids["end"] + 1)
    taught = {name for part in recipe["parts"] for name in part["families"]}
    probe = Probe(tokenizer, ids["pad"], recipe["probe"], families=[name for name in FAMILIES if name in taught])
    bar = tqdm(initial=run.pool, total=recipe["pools"], unit="pool", mininterval=30, disable=run.rank > 0)
    while run.pool < recipe["pools"]:
        loss = run.learn(pools)
        bar.update()
        bar.set_postfix(loss=round(loss, 3), refresh=False)
        if run.rank == 0 and (run.pool % recipe["every"] == 0 or run.pool == recipe["pools"]):
            right = probe(objective, run.model)
            record = {"pool": run.pool, "step": run.step, "tokens": run.tokens, "cpu_s": round(run.cpu_s, 1)}
            record |= {"loss": round(loss, 4), "right": right, "mean": round(sum(right.values()) / len(right), 4)}
            with (args.work / f"{args.model}.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            run.keep()
            folder_of(args.export / recipe["name"], run.model, tokenizer, ids, recipe.get("generation", {}))


if __name__ == "__main__":
    main()
