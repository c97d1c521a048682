"""The contract of training: batches of text, and the objective that a drafter's parameters are fitted to.

In the shape descriptions `B` denotes rows, `T` tokens per row, `V` the vocabulary.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention import Unrolled
from specjax.lm import LM, Block, Output, Wants
from specjax.models.param_axes import head_shardings
from specjax.objectives.means import MEAN, Mean
from specjax.settings import settle
from specjax.sharding import shardings
from specjax.sharding.rows import placed_rows

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of text, padded on the right. A row holds one document or several; none of them sees the others.

    Attributes:
      tokens: `[B, T]` int32; 0 where a row is padded.
      mask: `[B, T]` bool, which tokens are real and to be predicted: neither padding nor prompt.
      documents: `[B, T]` int32, the document of its row that a slot belongs to; None: a row is one document.
      output: the target's output for the rows, if it was captured before; None: the loop runs the target.
      wrong: `[B, T]` bool, which tokens of `mask` are labelled wrong; None: nothing is labelled.
      done: `[B]` float32, the share of all updates that were made before, the same in every row; None: it is no update's.
    """

    tokens: Array
    mask: Array
    documents: Array | None = None
    output: Output | None = None
    wrong: Array | None = None
    done: Array | None = None

    @classmethod
    def placed(cls, arrays: dict[str, Any], mesh: jax.sharding.Mesh | None) -> "Batch":
        """A batch from arrays by name, as `specjax.train.data.batches` gives them; a mesh splits their rows over its
        axis `data`.

        If there are several processes, each gives its own rows.
        """
        if mesh is not None:
            arrays = jax.tree.map(functools.partial(placed_rows, mesh), arrays)
        return cls(**jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), arrays))

    @property
    def positions(self) -> Array:
        """`[B, T]` int32, from 0 on in every document."""
        slots = jnp.broadcast_to(jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None], self.tokens.shape)
        if self.documents is None:
            return slots
        begins = jnp.pad(self.documents[:, 1:] != self.documents[:, :-1], ((0, 0), (1, 0)))
        return slots - jax.lax.cummax(jnp.where(begins, slots, 0), axis=1)

    @property
    def sizes(self) -> Array:
        """`[B, T]` int32, how many tokens the document of each slot has."""
        if self.documents is None:
            return jnp.full(self.tokens.shape, self.tokens.shape[1], jnp.int32)
        return (self.documents[:, :, None] == self.documents[:, None]).sum(axis=2, dtype=jnp.int32)

    def together(self, steps: int) -> Array:
        """`[B, T - steps]` bool, whether slots t and t + steps belong to one document."""
        if self.documents is None:
            return jnp.ones((len(self.tokens), self.tokens.shape[1] - steps), bool)
        return self.documents[:, steps:] == self.documents[:, : self.tokens.shape[1] - steps]

    def due(self, steps: int) -> Array:
        """`[B, T - steps]` bool, whether slot t should predict token t + steps."""
        return self.mask[:, steps:] & self.together(steps)

    def seen(self, slots: Array) -> Array:
        """`[B, X, T]` bool, whether each of the slots `[B, X]` and each slot of the row belong to one document."""
        if self.documents is None:
            return jnp.ones((*slots.shape, self.tokens.shape[1]), bool)
        return jnp.take_along_axis(self.documents, slots, axis=1)[:, :, None] == self.documents[:, None]

    def block(self) -> Block:
        """The rows as one causal pass without a prefix reads them."""
        return _block(self.tokens, self.positions, self.documents)

    def pairs(self, passes: int = 0) -> Block:
        """The pairs of feature t and token t + 1 as a head reads them, `[B, T - 1]`.

        Args:
          passes: the number of earlier passes over them, whose keys and values are the block's past; see `Unrolled`.
        """
        documents = None
        if self.documents is not None:  # a pair across two documents belongs to neither
            documents = jnp.where(self.together(1), self.documents[:, 1:], -1)
        return _block(self.tokens[:, 1:], self.positions[:, :-1], documents, passes)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a method's authors update its parameters, used by default; without a recipe, the update is that of HF's trainer.

    Attributes:
      clip: the largest norm of a gradient, or its largest entry.
      clip_by: `norm`, or `value`: entries are clipped one by one.
      weight_decay: of AdamW.
    """

    clip: float = 1.0
    clip_by: str = "norm"
    weight_decay: float = 0.0


Lines = Literal["text", "labelled", "sourced"]
"""Lines that hold text, or that say too which tokens are wrong (`Batch.wrong`), or whose prompts are sources for an encoder."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What rows of training data are made of.

    Attributes:
      packed: whether a row may hold several documents.
      lines: what the lines of the data are. A row of a source holds it and then one whole text.
    """

    packed: bool = True
    lines: Lines = "text"


TEXT = Kind()
"""The usual one."""


class Objective(abc.ABC):
    """Parameters, and the loss that they are fitted to. Implementations are frozen dataclasses: static and hashable.

    Their `init` and `loss` are traced under this package's own settings (`specjax.settings`), whatever the caller's
    are.
    """

    recipe: ClassVar[Recipe] = Recipe()
    """How its authors update the parameters."""

    starts_from_layers: ClassVar[bool] = False
    """Whether `init` reads the parameters of the target's layers."""

    follows_dtype: ClassVar[bool] = False
    """Whether its products are in the type of the parameters that `loss` is given, so that a pass may round them."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Fields by a word in a line: `preset=paper` trains as the authors do if the defaults are ours, `preset=small` is
    for small models if the defaults are theirs.
    """

    lines: ClassVar[Lines] = "text"
    """What the lines of its data are, see `Kind`."""

    saved: ClassVar[tuple[str, ...]] = ()
    """Fields of `method` that parameters depend on, written with the parameters and read back with them."""

    def __init_subclass__(cls, **more: Any):
        super().__init_subclass__(**more)
        settle(cls, frozenset(("init", "loss")))

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents."""
        return True

    @property
    def kind(self) -> Kind:
        """What its rows are made of."""
        return Kind(self.packed, self.lines)

    @property
    def reads(self) -> Wants | None:
        """What the loss asks of `of_target`, so that it can be captured beforehand; None: it runs layers of the target
        itself.
        """
        return None

    @property
    def method(self) -> Any:
        """The drafter or unmask policy that is trained."""
        return getattr(self, "drafter", None)

    @property
    def rates(self) -> Mapping[str, float]:
        """How many times the learning rate some entries of the parameters, a dict, learn at; other entries learn at it."""
        return {}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `saved`, as JSON has them."""
        found = {name: getattr(self.method, name) for name in self.saved}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def param_shardings(self, mesh: jax.sharding.Mesh, params: PyTree) -> PyTree:
        """Where a pass reads its parameters on a mesh, by their logical axes."""
        if self.method is None:
            return head_shardings(mesh, params)
        return self.method.param_shardings(mesh, params)

    def held_out(self, target_params: PyTree) -> tuple["Objective", PyTree]:
        """The objective and its `target_params` for reading held-out text: without what only training draws or leaves out."""
        return self, target_params

    def merit(self, metrics: dict[str, float]) -> float:
        """How good parameters are, from the loss and metrics of held-out text; more is better.

        If drafts are accepted, it is how many tokens of a draft are, assuming independent chances at each depth;
        otherwise it is minus the loss. The loss of drafts may be in units that change during training (`tvdpp`, `lk`).
        """
        if "acceptance" not in metrics:
            return -metrics["loss"]
        accepted, chance, depth, name = 0.0, 1.0, 1, "acceptance"
        while name in metrics:
            chance *= metrics[name]
            accepted, depth = accepted + chance, depth + 1
            name = f"acceptance_{depth}"
        return accepted

    def export(self, params: PyTree) -> PyTree:
        """Trained parameters in the form that the drafter reads."""
        return params

    @abc.abstractmethod
    def init(self, key: Array, target_params: PyTree) -> PyTree:
        """Parameters before training."""

    @abc.abstractmethod
    def loss(
        self, params: PyTree, target_params: PyTree, batch: Batch, key: Array, mean: Mean = MEAN
    ) -> tuple[Array, dict[str, Array]]:
        """The mean loss of a batch, differentiated in `params` alone, or a part's share of it.

        Args:
          params: the trained parameters.
          target_params: the frozen parameters.
          batch: the rows.
          key: for draws: one key, or one per row, `[B]`.
          mean: takes the means.

        Returns:
          A scalar, and scalar metrics by name, which are also means: `acceptance` is what progress shows. `weight` is
          not a mean, but the weight that the first mean is taken over (if left out: `mask[:, 1:]`).
        """


class OfModel(Objective):
    """A loss of all parameters of a model, the field `lm`."""

    def param_shardings(self, mesh: jax.sharding.Mesh, params: PyTree) -> PyTree:
        """See `Objective.param_shardings`."""
        lm: Any = self.lm  # type: ignore[attr-defined]
        return shardings(mesh, lm.axes(params), params, lm.axis_counts())


class OfTarget(OfModel):
    """A loss of the target's own parameters, with draws for every row."""

    @property
    def packed(self) -> bool:
        """A row is one document, since something is drawn for the row."""
        return False

    def init(self, key: Array, target_params: PyTree) -> PyTree:
        """The target's parameters, from which training continues."""
        return target_params


def each_row(draw: Callable[[Array], Any], key: Array, rows: int) -> Any:
    """Every row's draws, arrays `[B, ...]`, with one key per row, so that they are the same in a part of the batch.

    Args:
      draw: from a key to a row's draws.
      key: one key, or one per row.
      rows: B.
    """
    return jax.vmap(draw)(key if key.ndim else jax.random.split(key, rows))


def drawn_places(key: Array, useful: Array, count: int) -> tuple[Array, Array]:
    """Random places of every row, without replacement.

    Args:
      key: one key, or one per row.
      useful: `[B, T]` bool, places that may be drawn.
      count: places per row.

    Returns:
      Indices `[B, R]` into the row, all different, and whether each is a useful place `[B, R]`; useful places come
      first. R is at most T.
    """
    drawn = each_row(lambda key: jax.random.uniform(key, useful.shape[1:]), key, len(useful))
    value, at = jax.lax.top_k(jnp.where(useful, drawn, -1.0), min(count, useful.shape[1]))
    return at.astype(jnp.int32), value >= 0


def check_not_negative(name: str, objective: Any, *fields: str) -> None:
    """Raises ValueError if one of an objective's fields is below 0, or is not a number."""
    for field in fields:
        if not (value := getattr(objective, field)) >= 0:
            raise ValueError(f"{name}: {field} must not be negative, got {value}")


def read(lm: LM, params: PyTree, batch: Batch, wants: Wants) -> Output:
    """One causal pass over whole rows, without a cache.

    Args:
      lm: the model.
      params: its parameters.
      batch: the rows. The logits of slot t score token t + 1.
      wants: what to return.
    """
    return lm(params, batch.block(), None, wants=wants)


def of_target(lm: LM, params: PyTree, batch: Batch, wants: Wants) -> Output:
    """A target's output for a batch: as it was captured, or from a pass.

    It has a gradient only in parameters that are trained too (`specjax.objectives.joint`).

    Args:
      lm: the target.
      params: its parameters; those of its layers are not read if its output was captured.
      batch: the rows.
      wants: what to return at least.
    """
    if batch.output is None:
        return read(lm, params, batch, wants)
    dtype = jax.eval_shape(lambda: lm.embed(params, batch.tokens)).dtype
    typed = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
    return dataclasses.replace(batch.output, hidden=typed(batch.output.hidden), final=typed(batch.output.final))


def _block(tokens: Array, positions: Array, documents: Array | None, passes: int = 0) -> Block:
    """A block whose slots see their document, as after so many passes over it."""
    slots = jnp.arange(tokens.shape[1])
    steps = jnp.arange(passes)[::-1]  # how far before a slot the one lies that it sees of each later pass
    first = (slots[None] <= slots[:, None] - passes)[None]
    later = (slots[:, None] >= steps[None])[None]
    if documents is not None:
        first &= documents[:, :, None] == documents[:, None]
        before = jnp.maximum(slots[:, None] - steps[None], 0)
        later &= jnp.take(documents, before, axis=1) == documents[:, :, None]
    visible: Any = None if documents is None else first
    return Block(tokens, positions, jnp.zeros((len(tokens),), jnp.int32), Unrolled(first, later) if passes else visible)
