"""Hidden Transfer: maps at inner layers make coming tokens' hidden states, which other layers finish (arXiv:2404.12022)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Extra, Proposal, Trained, TreeDrafter
from specjax.draft.medusa import settle_tree
from specjax.lm import Block, Partial, Wants, inputs
from specjax.models.few_bits import dot

Array = jax.Array

MAPS = 3
"""How many there are if no layers are given."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transferred:
    """What the pseudo slots of the last accepted node say.

    Attributes:
      final: `[B, m, E]` float32, after the final norm: their distributions are those of the tokens one, two, ... places
        after the root.
      entered: `[B, m, E]` float32, the residual stream that enters each map's layer at the prompt's last token but one,
        for the row's first proposal.
      fresh: `[B]` bool, whether the row has still to make its first proposal.
    """

    final: Any
    entered: Any
    fresh: Any


@dataclasses.dataclass(frozen=True)
class HiddenTransfer(TreeDrafter, Trained):
    """Every node of the tree gets m pseudo slots, one per map; those of the accepted node fill the next tree.

    Map j makes its slot from the node's residual stream where it enters layer `layers[j]`. The slot stands j + 1 places
    after the node. It sees what the node sees, the node itself and the node's earlier slots, in its own layer and all
    later ones. No node sees a pseudo slot.

    Drafting runs the layers below the last map's; the target goes on from there with nodes and slots. All nodes of a
    depth share one distribution. `params["draft"]` is {`maps`: a list of {`kernel` `[E, E]`}}.

    A row's first proposal reads the slots of its last token but one in a separate pass, from the residual streams that
    the prefill left.

    The target's head reads all slots of a step, and only those of the nodes are needed.

    Attributes:
      expander: turns the maps' distributions into a tree, no deeper than the number of maps. None: a small static tree.
      layers: for each map the layer that its slot enters, from 1 on, not descending. Empty: three, spread over the last
        third of the target.
      target: filled in by `bind`.
    """

    about = About(
        "hidden_transfer",
        "maps at inner layers make the hidden states of coming tokens, which the target's other layers finish",
        "arXiv:2404.12022",
        expander="static:tree=2 | 1",
        loads="head",
    )
    tiles = True
    shared = True
    plain_tree = False

    expander: Any = None
    layers: tuple[int, ...] = ()
    target: Any = None

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))
        if list(self.layers) != sorted(self.layers):
            raise ValueError(f"hidden_transfer: layers must not descend, got {list(self.layers)}")
        settle_tree(self, self.maps, "layers")
        super().__post_init__()

    @property
    def maps(self) -> int:
        """m."""
        return len(self.layers) or MAPS

    @property
    def rungs(self):
        return (self.nodes,)

    @property
    def wants(self) -> Wants:
        return Wants(final=True)

    @property
    def prefill_wants(self) -> Wants:
        return Wants(hidden=self.before)

    @property
    def before(self) -> tuple[int, ...]:
        """For each map the layer below its own, whose output it reads."""
        return tuple(layer - 1 for layer in self.layers)

    def bind(self, target):
        layers = self.layers or usual_layers(target.num_layers)
        for layer in dict.fromkeys(layers):
            _check_begins_at(target, layer)
        return dataclasses.replace(self, layers=layers, target=target)

    def embedded(self, target_params) -> jax.ShapeDtypeStruct:
        """`[1, 1, E]` of the target, without values."""
        return jax.eval_shape(self.target.embed, target_params, jax.ShapeDtypeStruct((1, 1), jnp.int32))

    def width(self, target_params) -> int:
        """E, of the target."""
        return self.embedded(target_params).shape[-1]

    def init_params(self, key, target_params):
        """Maps begin as the identity: a slot begins as its node one place further on."""
        size = self.width(target_params)
        return {"maps": [{"kernel": jnp.eye(size, dtype=jnp.float32)} for _ in self.layers]}

    @classmethod
    def objective(cls):
        from specjax.draft.hidden_transfer.objective import TrainHiddenTransfer

        return TrainHiddenTransfer

    def init(self, params, batch, capacity):
        """Raises:
        ValueError: if there are not as many maps as layers, or not of the target's width.
        """
        size = self.width(params["target"])
        got = [own["kernel"].shape for own in params["draft"]["maps"]]
        if got != [(size, size)] * self.maps:
            raise ValueError(
                f"hidden_transfer: the maps are {got}, and these layers and this target need {self.maps} of {(size, size)}: "
                "train them with the same layers and target"
            )
        zeros = lambda: jnp.zeros((batch, self.maps, size), jnp.float32)
        return Transferred(zeros(), zeros(), jnp.ones((batch,), bool))

    def prefill(self, params, draft, chunk, output):
        count = chunk.real.sum(axis=1)
        last = jnp.maximum(count - 1, 0)[:, None, None]
        entered = [jnp.take_along_axis(output.hidden[layer], last, axis=1) for layer in self.before]
        entered = jnp.concatenate(entered, axis=1).astype(draft.entered.dtype)
        return dataclasses.replace(draft, entered=jnp.where((count > 0)[:, None, None], entered, draft.entered))

    def begun(self, params, draft, view) -> Transferred:
        """The state of rows that have already proposed, and what the prompt says in rows that have not."""
        fresh = draft.fresh & view.live & (view.length > 1)

        def read(final):
            batch, base = final.shape[0], view.length - 1
            steps = jnp.arange(self.maps)
            positions, tokens = base[:, None] + steps[None], jnp.zeros((batch, self.maps), jnp.int32)
            block = Block(tokens, positions, base, jnp.tri(self.maps, dtype=bool)[None])
            dtype = self.embedded(params["target"]).dtype  # the slots of later steps begin in it too
            entered = [draft.entered[:, i : i + 1].astype(dtype) for i in range(self.maps)]
            said = finished(self, params["draft"], params["target"], entered, block, view.cache)
            return jnp.where(fresh[:, None, None], said.astype(final.dtype), final)

        final = jax.lax.cond(jnp.any(fresh), read, lambda final: final, draft.final)
        return Transferred(final, draft.entered, jnp.zeros_like(fresh))

    def propose(self, params, draft, view, sampler):
        draft = self.begun(params, draft, view)
        logits = self.target.unembed(params["target"], draft.final)
        grow = lambda carry, level: (carry, logits[:, level.depth, None])
        tree = self.expander(view.root, logits[:, 0], grow, None, sampler, keep_q=view.keep_q)
        proposal = Proposal(tree, draft, self.pseudo(tree, view.length))
        return dataclasses.replace(proposal, partial=self.entering(params, proposal.block(view), view.cache))

    def pseudo(self, tree, length) -> Extra:
        """The pseudo slots of all nodes, map by map."""
        batch, nodes = length.shape[0], self.nodes
        step, node = jnp.divmod(jnp.arange(self.maps * nodes), nodes)
        above = jnp.broadcast_to(tree.ancestors(), (batch, nodes, nodes))[:, node]
        own = (node[:, None] == node[None]) & (step[None] <= step[:, None])
        depth = jnp.broadcast_to(tree.depth, (batch, nodes))[:, node]
        return Extra(
            tokens=jnp.zeros((batch, len(step)), jnp.int32),
            positions=length[:, None] + depth + step[None],
            visible=jnp.concatenate([above, jnp.broadcast_to(own[None], (batch, *own.shape))], axis=2),
        )

    def entering(self, params, block: Block, cache) -> Partial:
        """Nodes and pseudo slots where they enter the last map's layer."""
        target, weights = self.target, params["target"]
        partial = Partial(inputs(target, weights, block.first(self.nodes)), None, 0)
        for own, layer in zip(params["draft"]["maps"], self.layers, strict=True):
            partial = partial.through(target, weights, layer, block.first(partial.h.shape[1]), cache)
            partial = partial.beside(dot(partial.h[:, : self.nodes], own["kernel"]))
        return partial

    def observe(self, params, draft, proposal, output, verdict):
        leaf = jnp.take_along_axis(verdict.path, verdict.accepted[:, None], axis=1)
        slots = self.nodes * (1 + jnp.arange(self.maps))[None] + leaf
        final = jnp.take_along_axis(output.final, slots[:, :, None], axis=1)
        return dataclasses.replace(draft, final=final.astype(draft.final.dtype))


def usual_layers(count: int) -> tuple[int, ...]:
    """Where three maps are in a target of `count` layers: spread over its last third.

    >>> usual_layers(32), usual_layers(6), usual_layers(2)
    ((22, 25, 28), (4, 4, 5), (1, 1, 1))
    """
    third = count // 3
    return tuple(max(1, min(count - 1, count - third + i * third // MAPS)) for i in range(MAPS))


def _check_begins_at(lm: Any, layer: int) -> None:
    """Raises ValueError if slots of width E cannot begin at a layer of an LM (`Partial.beside`)."""
    if lm.num_layers < 2:
        raise ValueError(
            "hidden_transfer: no slot can begin within a target of fewer than two layers: take another drafter"
        )
    if not 0 < layer < lm.num_layers:
        raise ValueError(
            f"hidden_transfer: a slot cannot begin at layer {layer} of a target of {lm.num_layers}: choose 1 to "
            f"{lm.num_layers - 1}"
        )
    config = getattr(lm, "config", None)
    if config is None:
        return
    if config.embedding.streams:
        raise ValueError(
            "hidden_transfer: a slot begins as one residual stream, and this target has several: take another drafter"
        )
    for reader in range(layer, lm.num_layers):
        if config.source(reader) < layer:
            raise ValueError(
                f"hidden_transfer: layer {reader} reads the keys of layer {config.source(reader)}, which a slot that begins at "
                f"layer {layer} does not have: take another drafter"
            )


def finished(
    drafter: HiddenTransfer, draft: Any, weights: Any, entered: list[Array], block: Block, cache: Any, past: Any = None
) -> Array:
    """Pseudo slots alone, after the target's final norm: `[B, m * R, E]`, map by map.

    Args:
      drafter: bound to the target.
      draft: its parameters.
      weights: the target's.
      entered: for each map `[B, R, E]`, the residual stream of the R tokens that the slots are made from, where it
        enters the map's layer.
      block: the slots, map by map.
      cache: the text before them; or None.
      past: the delta of the text before them that is not committed; or None.
    """
    target, stops = drafter.target, (*drafter.layers[1:], drafter.target.num_layers)
    h = entered[0][:, :0]
    for own, stream, lo, hi in zip(draft["maps"], entered, drafter.layers, stops, strict=True):
        h = jnp.concatenate([h, dot(stream, own["kernel"])], axis=1)
        if hi > lo:
            h, _ = target.layers(weights, h, lo, hi, block.first(h.shape[1]), cache, past)
    return target.norm(weights, h)
