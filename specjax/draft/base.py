"""The drafter contract, and what a proposal is.

In the shape descriptions `B` denotes rows, `N` tree nodes, `X` extra slots, `D` the deepest node a step may verify, `L`
the text buffer, `V` the target's vocabulary, `E` the model width.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.about import Named, abouts
from specjax.arrays import Array, Bool, Int, PyTree
from specjax.expand.base import Expander
from specjax.lm import LM, Block, Output, Partial, Source, Wants
from specjax.models.param_axes import head_shardings
from specjax.pretty import Pretty
from specjax.sampling import Sampler
from specjax.sharding.rules import replicated
from specjax.tree import Children, Extra, OfTopology, Topology, Tree
from specjax.verify.base import Verdict

if TYPE_CHECKING:  # imported only when it is needed
    from specjax.draft.heads.layout import Layout
    from specjax.objectives.base import Objective


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View(Pretty):
    """What a drafter may read of the decoder's state.

    Attributes:
      tokens: `[B, L]` int32; garbage from `length` on.
      length: `[B]` int32, committed tokens; the root is the last of them and has no cache entry yet.
      live: `[B]` bool, rows still decoding.
      cache: the target's cache.
      max_depth: static, D: a step commits at most D + 1 tokens, including tokens that another drafter proposed.
      keep_q: static, whether the verifier reads `Tree.log_q`.
      source: `[B, S]` int32, the tokens that the target's encoder has read, -1 where there are none; None if it has no
        such tokens (`LM.source`). A drafter that copies from the text copies from them too.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    live: Bool[Array, " B"]
    cache: PyTree
    max_depth: int = dataclasses.field(metadata={"static": True})
    keep_q: bool = dataclasses.field(default=False, metadata={"static": True})
    source: Int[Array, "B S"] | None = None

    @property
    def root(self) -> Int[Array, " B"]:
        """`[B]` int32, the last committed token."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk(Pretty):
    """A piece of the prompt that the target has just read.

    Attributes:
      block: the target's input, `[B, T]` tokens at the same positions in every row.
      real: `[B, T]` bool, the true tokens of the prompt; its last token, the first step's root, is never among them.
      following: `[B, T]` int32, the token after each; after the last real one it is the root.
    """

    block: Block
    real: Bool[Array, "B T"]
    following: Int[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal(Pretty):
    """A tree to verify, the drafter's new state, and optionally extra slots and a head start for the target."""

    tree: Tree
    draft: PyTree
    extra: Extra | None = None
    partial: Partial | None = None

    @property
    def slots(self) -> int:
        """Static: how many slots the target reads: tree nodes and extra slots."""
        return self.tree.nodes + (0 if self.extra is None else self.extra.tokens.shape[1])

    def beside(self, extra: Extra | None) -> "Proposal":
        """The proposal with the slots that the verifier asks for (see `specjax.verify.Verifier.extra`), or None for no slots.

        Raises:
          ValueError: if the proposal is already more than a tree.
        """
        if extra is not None and (self.extra is not None or self.partial is not None):
            raise ValueError(
                "this verifier adds slots to a tree, but not to a tree with other slots: choose a drafter without extra slots"
            )
        return self if extra is None else dataclasses.replace(self, extra=extra)

    def prefix(self, nodes: int) -> "Proposal":
        """The proposal of its first `nodes` nodes alone. It must have no extra slots."""
        if nodes == self.tree.nodes:
            return self
        if self.extra is not None:
            raise ValueError("a proposal with extra slots cannot be cut: its drafter must have one rung")
        partial = self.partial
        if partial is not None:
            h, delta = jax.tree.map(lambda x: x[:, :nodes], (partial.h, partial.delta))
            partial = Partial(h, delta, partial.lo)
        return Proposal(self.tree.prefix(nodes), self.draft, None, partial)

    def block(self, view: View) -> Block:
        """The target's input: tree nodes first, then extra slots."""
        tree = self.tree
        base = view.length - 1
        positions = base[:, None] + tree.depth
        visible = None if tree.is_chain else tree.ancestors()
        if self.extra is None:
            return Block(tree.tokens, positions, base, visible)
        extra = self.extra
        batch, count = extra.tokens.shape
        nodes = jnp.broadcast_to(tree.ancestors(), (batch, tree.nodes, tree.nodes))
        nodes = jnp.concatenate([nodes, jnp.zeros((batch, tree.nodes, count), bool)], axis=2)
        embeddings = embedded = None
        if extra.embeddings is not None:
            pad = jnp.zeros((batch, tree.nodes, extra.embeddings.shape[2]), extra.embeddings.dtype)
            embeddings = jnp.concatenate([pad, extra.embeddings], axis=1)
            embedded = jnp.broadcast_to(jnp.arange(tree.nodes + count)[None] >= tree.nodes, (batch, tree.nodes + count))
        return Block(
            jnp.concatenate([tree.tokens, extra.tokens], axis=1),
            jnp.concatenate([positions, extra.positions], axis=1),
            base,
            jnp.concatenate([nodes, extra.visible], axis=1),
            embeddings,
            embedded,
        )


@dataclasses.dataclass(frozen=True)
class Drafter(abc.ABC):
    """Proposes a tree. Implementations are frozen dataclasses whose fields are their hyperparameters.

    `params` is `{"target": ..., "draft": ...}` throughout.
    """

    about: ClassVar[Named] = None
    """Its names in the registry."""

    tiles: ClassVar[bool] = False
    """Whether `specjax.models.widening.tiled` widens its parameters. An inherited value does not count: a subclass may
    have more parameters.
    """

    @property
    def needs_params(self) -> bool:
        """Static: whether `params["draft"]` must hold parameters."""
        return False

    @property
    def wants(self) -> Wants:
        """Static: what `observe` needs of the target's Output."""
        return Wants()

    @property
    def prefill_wants(self) -> Wants:
        """Static: what `prefill` needs of the target's Output."""
        return Wants()

    @property
    @abc.abstractmethod
    def nodes(self) -> int:
        """Static: tree nodes, the root included."""

    @property
    @abc.abstractmethod
    def depth(self) -> int:
        """Static: the depth of the deepest node."""

    @property
    def is_chain(self) -> bool:
        """Static: whether the tree is always a chain."""
        return self.nodes == self.depth + 1

    @property
    def children(self) -> Children:
        """Static: how a node's children come to be; some verifiers need to know it."""
        return "deterministic"

    @property
    def alone(self) -> bool:
        """Static: whether a row's tree depends on no other row.

        If it does depend on others, they may change the tree and so the number of steps. A verifier whose text follows
        the draft would let them change the text, so it refuses such a drafter.
        """
        return True

    @property
    def looks_back(self) -> float:
        """Static: how far back the drafter reads the target's cache, beyond what a step of the target itself sees.

        In positions; `math.inf` if it may read any. Layers with a window keep that many more
        (`specjax.Speculative.with_rings`).
        """
        return 0

    @property
    def rungs(self) -> tuple[int, ...]:
        """Static: ascending node counts that a step may stop at; `nodes` is the last.

        The target reads only the first nodes, up to the lowest rung that covers every valid node of the live rows. So a
        proposal that puts valid nodes first costs no more than those. A proposal with extra slots has one rung.
        """
        return (self.nodes,)

    @property
    def weighs_rungs(self) -> bool:
        """Static: whether it chooses between its rungs by their costs, so that all of them are compiled everywhere.

        See `specjax.speculative.Speculative.rungs`.
        """
        return False

    @property
    def plain_tree(self) -> bool:
        """Static: whether a proposal is only a tree, without extra slots or a partial stack."""
        return True

    @property
    def needs_own_verdicts(self) -> bool:
        """Static: whether `observe` learns from how its own proposals are judged, so that it must get no other verdicts."""
        return False

    def bind(self, target: LM) -> "Drafter":
        """This drafter made ready for a target (itself, if there is nothing to fill in).

        Raises:
          ValueError: if it cannot serve that target.
        """
        return self

    def recording(self, keep_q: bool) -> "Drafter":
        """This drafter, bound to its target, made ready for a verifier that reads `Tree.log_q` or for one that does not.

        Only a drafter whose state depends on that has something to do.
        """
        return self

    def init(self, params: PyTree, batch: int, capacity: int) -> PyTree:
        """An empty state; every leaf leads with `batch`, except those that the rows share according to `axes`."""
        return ()

    def axes(self, draft: PyTree) -> PyTree:
        """Logical axis names of every leaf (see `specjax.sharding.rules`).

        A leaf that does not lead with "batch" is shared by the rows: it may change speed, never text.
        """
        return jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), draft)

    def param_shardings(self, mesh: jax.sharding.Mesh, params: PyTree) -> PyTree:
        """Where its parameters, `params["draft"]`, belong on a mesh; by default every device has a copy."""
        return replicated(mesh, params)

    def encode(self, params: PyTree, draft: PyTree, source: Source, tokens: Int[Array, "B S"] | None) -> PyTree:
        """Reads the sources of fresh rows, before the first chunk of their prompts. Only for a target with an encoder.

        Args:
          params: the parameters.
          draft: the state of fresh rows.
          source: what the target's encoder reads, for a draft model with its own encoder.
          tokens: the same as the target's tokens, -1 where there are none, for drafters that learn from a prompt's
            tokens; or None (`LM.source`).
        """
        return draft

    def prefill(self, params: PyTree, draft: PyTree, chunk: Chunk, output: Output) -> PyTree:
        """Takes in a chunk of the prompt; chunks come in order."""
        return draft

    @abc.abstractmethod
    def propose(self, params: PyTree, draft: PyTree, view: View, sampler: Sampler) -> Proposal:
        """Proposes one tree per row, from committed tokens only."""

    def catch_up(self, params: PyTree, draft: PyTree, view: View) -> PyTree:
        """The state made ready for a step that calls `propose`, after steps that did not.

        State that only `observe` updates needs no catching up.
        """
        return draft

    @property
    def skips(self) -> bool:
        """Static: whether steps may leave `propose` out, if `catch_up` precedes the next one.

        Then drafts are the same as if every step had called `propose`, except for rounding.
        """
        return True

    def trimmed(self, params: PyTree, target_params: PyTree, ids: Any) -> tuple["Drafter", PyTree]:
        """This drafter and its parameters with a head over only the tokens `ids` `[U]`; see `specjax.draft.trim`.

        Raises:
          ValueError: if it has no head.
        """
        raise ValueError(f"{type(self).__name__} has no language-model head to trim")

    def widened(self, params: PyTree, k: int, width: int) -> PyTree:
        """Its parameters k times as wide, for a target that `specjax.models.widen` widened: its drafts stay the same.

        Args:
          params: `params["draft"]`.
          k: the factor.
          width: E before.

        Raises:
          ValueError: if no rule for that is known. A class gives one by its own `tiles`, or by its own version of this
            method.
        """
        if not vars(type(self)).get("tiles"):
            raise ValueError(
                f"no rule widens the parameters of {type(self).__name__}; `tiles = True` in its class says that "
                "`specjax.models.widening.tiled` does, or it has a `widened` of its own"
            )
        from specjax.models.widening import tiled

        return tiled(params, k, width)

    def observe(self, params: PyTree, draft: PyTree, proposal: Proposal, output: Output, verdict: Verdict) -> PyTree:
        """Learns from the target's output over all slots, rejected ones too."""
        return draft


def of_inner(name: str) -> Any:
    """A property of a drafter around another one, its `drafter`: that drafter's own."""
    return property(lambda self: getattr(self.drafter, name))


def proposed(
    needed: Array, propose: Callable[[PyTree], tuple[Tree, PyTree]], draft: PyTree, view: View
) -> tuple[Tree, PyTree]:
    """`propose(draft)`, or, if the scalar `needed` is false, the root alone and the state as it was; nothing is computed then.

    Args:
      needed: scalar bool.
      propose: from a state to a tree and the new state.
      draft: the state.
      view: the step's.
    """
    shape = jax.eval_shape(propose, draft)[0]
    root = jnp.broadcast_to(jnp.arange(shape.nodes)[None] == 0, shape.tokens.shape)
    bare = dataclasses.replace(
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape),
        tokens=jnp.where(root, view.root[:, None], -1),
        parent=jnp.where(root, -1, 0),
        depth=jnp.where(root, 0, 1),
        valid=root,
    )
    if shape.topology is not None:
        fixed = Tree.of(shape.topology, bare.tokens, root)
        bare = dataclasses.replace(bare, parent=fixed.parent, depth=fixed.depth)
    # a loop of at most one pass: XLA updates a cache in place in a loop, and copies it in and out of a branch
    once = jax.lax.while_loop(
        lambda carry: carry[0], lambda carry: (jnp.array(False), *propose(carry[2])), (needed, bare, draft)
    )
    return once[1:]


def caught_up(prefill: Callable[..., Any], params: PyTree, draft: Any, view: View) -> Any:
    """`Drafter.catch_up` for a drafter whose own cache of `draft.length` `[B]` tokens grows in `propose`.

    It reads blocks of D + 1 tokens until no live row is further behind than that, by `prefill`, `Drafter.prefill` or a
    part of it, which must not need the target's output.
    """
    width = view.max_depth + 1
    take = lambda at: jnp.take_along_axis(view.tokens, at, axis=1, mode="clip")

    def read(draft):
        at = draft.length[:, None] + jnp.arange(width)[None]
        chunk = Chunk(Block(take(at), at, draft.length), at < view.length[:, None] - 1, take(at + 1))
        return prefill(params, draft, chunk, Output(None))

    behind = lambda draft: jnp.any(view.live & (view.length - draft.length > width))
    return jax.lax.while_loop(behind, read, draft)


def ladder(nodes: int) -> tuple[int, ...]:
    """Rungs for trees with valid nodes first: the root alone, a quarter of the nodes, half of them, and all of them."""
    return tuple(sorted({1, -(-nodes // 4), -(-nodes // 2), nodes}))


@dataclasses.dataclass(frozen=True)
class ChainDrafter(OfTopology, Drafter):
    """A drafter of one chain.

    Attributes:
      length: how many tokens it proposes, at most.
    """

    length: int = 1

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.length)

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.nodes)

    def chain(self, view: View, tokens: Array, draft: Any) -> Proposal:
        """The proposal of these tokens `[B, length]`, up to the first that is -1."""
        tokens = jnp.concatenate([view.root[:, None], tokens], axis=1)
        return Proposal(Tree.of(self.topology, tokens, tokens >= 0), draft)


@dataclasses.dataclass(frozen=True)
class TreeDrafter(Drafter):
    """A drafter that scores nodes and leaves the tree's shape to its `expander`, which `check_tree` may refuse."""

    shared: ClassVar[bool] = False
    """Whether all nodes of a level share one distribution, so that `Grow` gives `[B, 1, V]`."""

    def __post_init__(self):
        self.check_tree(self.expander)

    @classmethod
    def check_tree(cls, expander: Expander) -> None:
        """Raises ValueError for an expander that cannot grow trees of such drafters."""
        if expander.needs_shared and not cls.shared:
            tree, own = (next((a.name for a in abouts(k)), k.__name__) for k in (type(expander), cls))
            raise ValueError(
                f"{tree} takes drafters whose levels share one distribution, such as dflash and medusa, and the nodes of "
                f"{own} have their own: choose another expander, such as top_k"
            )

    @property
    @abc.abstractmethod
    def expander(self) -> Expander:
        """Turns next-token distributions into a tree; a field if the user may choose it."""

    @property
    def nodes(self) -> int:
        return self.expander.nodes

    @property
    def depth(self) -> int:
        return self.expander.depth

    @property
    def is_chain(self) -> bool:
        return self.expander.is_chain

    @property
    def children(self) -> Children:
        return self.expander.children

    @property
    def rungs(self) -> tuple[int, ...]:
        return self.expander.rungs

    def growing(self, expander: Any) -> "TreeDrafter":
        """The same drafter with another expander."""
        changes = {"expander": expander}
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Trained(Drafter):
    """A drafter whose own parameters `params["draft"]` are trained: nested dicts of arrays.

    Attributes:
      open_fields: the fields that are stored with trained parameters and may still be chosen anew, if the shapes stay.
    """

    needs_params = True
    open_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def cache_config(self) -> Any:
        """Static: the `ModelConfig` of the head's own decoder layers, which have a cache; None for a head without such
        layers.
        """
        return None

    def param_shardings(self, mesh, params):
        return head_shardings(mesh, params, self.cache_config)

    @abc.abstractmethod
    def init_params(self, key: Array, target_params: PyTree) -> PyTree:
        """Parameters to start training from, once the drafter is bound to the target."""

    def completed(self, params: PyTree, target_params: PyTree) -> PyTree:
        """The parameters with which it drafts: those that are stored, and what it takes from the target."""
        return params

    @classmethod
    def objective(cls) -> "type[Objective] | None":
        """The objective with which `specjax train` fits its parameters, imported when needed. Its field `drafter` is
        the bound drafter.

        None if they are not trained here.
        """
        return None

    @classmethod
    def layout(cls) -> "Layout | None":
        """How published files hold such a head, imported when needed. None if no such files are read."""
        return None
