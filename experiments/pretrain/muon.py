"""Muon (Jordan et al. 2024) for a model's matrices, all of one shape in one product, and Adam for the rest."""

import collections

import torch
import torch.distributed as dist
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrices of `[N, R, C]`, roughly: Newton-Schulz of the fifth order, in bfloat16."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


class Muon:
    """The matrices of the layers; momentum 0.95 in Nesterov's form, the step grows with a matrix's height.

    Where there are several processes, each makes its share of the matrices orthogonal.

    Args:
      params: 2-D parameters.
      decay: share of the rate by which weights shrink in a step.
    """

    def __init__(self, params: list[nn.Parameter], decay: float, momentum: float = 0.95):
        self.decay, self.momentum = decay, momentum
        by_shape = collections.defaultdict(list)
        for param in params:
            by_shape[tuple(param.shape)].append(param)
        self.groups = list(by_shape.values())
        self.moments = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        all_updates = []
        for group, moment in zip(self.groups, self.moments, strict=True):
            grads = torch.stack([param.grad for param in group])
            moment.lerp_(grads, 1 - self.momentum)
            updates, mine = torch.zeros_like(moment), slice(rank, None, processes)
            updates[mine] = orthogonal(grads[mine].lerp(moment[mine], self.momentum))
            all_updates.append(updates)
        if processes > 1:
            for updates in all_updates:
                dist.all_reduce(updates)
        for group, updates in zip(self.groups, all_updates, strict=True):
            scale = rate * max(1.0, group[0].shape[0] / group[0].shape[1]) ** 0.5
            for param, update in zip(group, updates, strict=True):
                param.mul_(1 - rate * self.decay).sub_(update, alpha=scale)


class Optimizer:
    """Both, over a clipped gradient."""

    def __init__(self, model: nn.Module, recipe: dict):
        self.recipe, self.params = recipe, list(model.parameters())
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("embed")]
        chosen = set(map(id, matrices))
        self.muon = Muon(matrices, recipe["weight_decay"])
        rest = [p for p in self.params if id(p) not in chosen]
        self.adam = torch.optim.Adam(rest, lr=recipe["adam_rate"], betas=(0.9, 0.98), eps=1e-10)

    def step(self, share: float) -> None:
        """One update at this share of the rates."""
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.muon.step(share * self.recipe["muon_rate"])
        for group in self.adam.param_groups:
            group["lr"] = share * self.recipe["adam_rate"]
        self.adam.step()
        for param in self.params:
            param.grad = None

    def state(self) -> dict:
        return {"muon": self.muon.moments, "adam": self.adam.state_dict()}

    def restore(self, state: dict) -> None:
        self.muon.moments = state["muon"]
        self.adam.load_state_dict(state["adam"])
