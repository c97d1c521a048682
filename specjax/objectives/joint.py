"""Joint training of a head and its target (Medusa-2: Cai et al. 2024, arXiv:2401.10774, section 2.2.2)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.chunks import chunked
from specjax.lm import Wants
from specjax.models import kv_heads, lora
from specjax.models.param_axes import head_shardings
from specjax.objectives.base import Batch, Objective, check_not_negative, of_target, read
from specjax.objectives.losses import ForwardKL, surprise
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import positions_at_a_time

Array = jax.Array
PyTree = Any

TEACHERS = ("text", "self")
SCHEDULES = ("constant", "sine")


@dataclasses.dataclass(frozen=True)
class Joint(Objective):
    """A head's own loss over a target that learns too, plus a loss that keeps the target what it was.

    Parameters are {`head`: the head's, `adapter`: low-rank changes of the target, see `specjax.models.lora`}. The loss is
    `L_0 + weight s(t) L`. L is the head's loss over the changed target. Its gradient also flows through the target's
    features, but not through the distributions that the head learns.

    Attributes:
      head: the head's objective.
      rank: of the changes.
      alpha: they are scaled by `alpha / rank`.
      weight: see above.
      teacher: what the target learns (`L_0`). `text`: the text's own tokens, by cross-entropy. `self`: what it said before
        it changed, by the forward KL.
      schedule: `constant`: s is 1. `sine`: s is `sin(pi/2 x)`, where x is the share of updates that were made.
      rate: the head's learning rate, as a multiple of the changes' one.
    """

    presets = {
        "paper": {"head": "medusa:heads=5,preset=paper,decay=0.8", "weight": 0.16},
        "self": {
            "head": "medusa:heads=5,preset=paper,decay=0.8", "weight": 0.008, "teacher": "self", "schedule": "sine",
        },
    }  # fmt: skip

    head: Any
    rank: int = 32
    alpha: float = 16.0
    weight: float = 0.2
    teacher: str = "text"
    schedule: str = "constant"
    rate: float = 4.0

    def __post_init__(self):
        check_not_negative("joint", self, "weight")
        for name in ("rank", "alpha", "rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"joint: {name} must be above 0, got {getattr(self, name)}")
        for name, known in (("teacher", TEACHERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ValueError(f"joint: {name} must be {' or '.join(known)}, got {getattr(self, name)!r}")

    @property
    def packed(self):
        return self.head.packed

    @property
    def method(self):
        return self.head.method

    @property
    def lm(self) -> Any:
        """The target."""
        return self.head.drafter.target

    @property
    def rates(self):
        return {"head": self.rate}

    def param_shardings(self, mesh, params):
        own = self.head.param_shardings(mesh, params["head"])
        return {"head": own, "adapter": head_shardings(mesh, params["adapter"])}

    def held_out(self, target_params):
        head, target_params = self.head.held_out(target_params)
        return dataclasses.replace(self, head=head), target_params

    def merit(self, metrics):
        """Minus the loss: drafts that are accepted more often by a target that forgot its texts are no gain."""
        return -metrics["loss"]

    def init(self, key, target_params):
        first, second = jax.random.split(key)
        return {"head": self.head.init(first, target_params), "adapter": self.fresh(second, target_params)}

    def fresh(self, key: Array, target_params: PyTree) -> PyTree:
        """Changes that change nothing yet."""
        whole = lambda params: kv_heads.merged(params, self.lm.config, self.lm.kv_copies)
        return lora.fresh(key, jax.eval_shape(whole, target_params), self.rank)

    def adapted(self, target_params: PyTree, adapter: PyTree) -> PyTree:
        """The changed target's parameters."""
        spread = lambda params: kv_heads.copied(params, self.lm.config, self.lm.kv_copies)
        return lora.added(target_params, adapter, self.alpha / self.rank, spread)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        """The loss. `target_loss` is L_0, `head_loss` is L, and the other metrics are the head's."""
        adapted = self.adapted(target_params, params["adapter"])
        captured = self.head.reads is not None  # otherwise the head runs layers of the target itself
        output = read(self.lm, adapted, batch, (self.head.reads or Wants()) | Wants(final=True))
        own = mean(self._nats(adapted, target_params, batch, output.final), batch.due(1))
        told = dataclasses.replace(batch, output=output) if captured else batch
        loss, metrics = self.head.loss(params["head"], adapted, told, key, mean)
        kept = {name: value for name, value in metrics.items() if name != "weight"}
        return own + self.weight * self._share(batch) * loss, kept | {"target_loss": own, "head_loss": loss}

    def _nats(self, adapted: PyTree, target_params: PyTree, batch: Batch, final: Array) -> Array:
        """L_0 at every slot with a next token, `[B, T - 1]`; the distributions of some slots exist at a time."""
        size = positions_at_a_time(batch)
        if self.teacher == "text":
            compare = lambda inputs: surprise(self.lm.unembed(adapted, inputs[0]), inputs[1])
            return chunked(compare, (final[:, :-1], batch.tokens[:, 1:]), size)
        before = of_target(self.lm, target_params, batch, Wants(final=True)).final

        def differ(inputs):
            was, now = (self.lm.unembed(of, x) for of, x in zip((target_params, adapted), inputs, strict=True))
            return ForwardKL().positions(was, now)

        return chunked(differ, (before[:, :-1], final[:, :-1]), size)

    def _share(self, batch: Batch) -> Array | float:
        """s(t); 1 for texts of no update."""
        if self.schedule == "constant" or batch.done is None:
            return 1.0
        return jnp.sin(jnp.pi / 2 * batch.done[0])
