"""Parallel prompt decoding: trained prompt tokens after the candidates guess the next step's tree (arXiv:2405.18628)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Extra, Proposal, Trained
from specjax.draft.ppd.trees import Tables, parse, tables
from specjax.lm import Block, Wants
from specjax.tree import Tree

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PPDState:
    """The predictions of the last accepted node's prompt tokens.

    Attributes:
      logits: `[B, m, V]` float32: their distributions, for the tokens one, two, ... places after the root.
      state: `[B]` int32, how many prompt tokens there were; -1 before the row's first proposal.
    """

    logits: Any
    state: Any


@dataclasses.dataclass(frozen=True)
class PPD(Trained):
    """Prompt slots follow the nodes of the tree; those of the accepted node fill the next tree.

    The next tree's shape depends on their number. Parameters: `{"embeddings": [m, ensembles, E]}`.

    A row's first proposal reads the prompt tokens after its last token but one, in a separate pass, so that its first
    tree is no smaller than later ones.

    Only the accepted node's prompt slots are read. The step keeps the logits `[B, N + X, V]` until the verdict, and
    ranks only their candidates, with the positions' own noise, rather than every slot's.

    Attributes:
      trees: the tree of every state and its prompt tokens, see `trees.parse`; `search_states` finds them.
      ensembles: slots per prompt token, each with a separate embedding; their logits are averaged.
      target: filled in by `bind`.
    """

    about = About(
        "ppd", "trained prompt tokens after every node guess what follows it", "arXiv:2405.18628", loads="head"
    )
    tiles = True
    open_fields = ("trees",)

    trees: str = "5 @ 2 1x5; 4 | 1 @ 2 1x5"
    ensembles: int = 1
    target: Any = None

    def __post_init__(self):
        parse(self.trees)
        if self.ensembles < 1:
            raise ValueError(f"ppd needs ensembles >= 1, got {self.ensembles}")

    @property
    def tables(self) -> Tables:
        return tables(self.trees, self.ensembles)

    @property
    def prompts(self) -> int:
        """m, the number of trained prompt tokens."""
        return self.tables.parent.shape[0] - 1

    @property
    def nodes(self) -> int:
        return self.tables.parent.shape[1]

    @property
    def slots(self) -> int:
        """X, the prompt slots beside the nodes."""
        return self.tables.step.shape[1]

    @property
    def depth(self) -> int:
        return int(self.tables.depth.max())

    plain_tree = False

    @property
    def is_chain(self) -> bool:
        return False

    @property
    def wants(self) -> Wants:
        return Wants(logits=True)

    def bind(self, target):
        ranks = 1 + int(self.tables.rank.max())
        if ranks > target.vocab_size:
            raise ValueError(f"ppd: a tree takes {ranks} candidates and the target has only {target.vocab_size} tokens")
        return dataclasses.replace(self, target=target)

    def init_params(self, key, target_params):
        """Prompt tokens begin as tokens of the vocabulary."""
        ids = jax.random.randint(key, (self.prompts, self.ensembles), 0, self.target.vocab_size)
        return {"embeddings": self.target.embed(target_params, ids).astype(jnp.float32)}

    @classmethod
    def objective(cls):
        from specjax.draft.ppd.objective import TrainPPD

        return TrainPPD

    @classmethod
    def layout(cls):
        from specjax.draft.ppd.published import LAYOUT

        return LAYOUT

    def init(self, params, batch, capacity):
        """Raises:
        ValueError: if the embeddings do not have this many prompt tokens and ensembles, or not the target's width.
        """
        ids = jax.ShapeDtypeStruct((self.prompts, self.ensembles), jnp.int32)
        wanted = jax.eval_shape(self.target.embed, params["target"], ids).shape
        got = params["draft"]["embeddings"].shape
        if got != wanted:
            raise ValueError(
                f"ppd: the embeddings are {got} (prompt tokens, ensembles, width), and these trees and this target need "
                f"{wanted}: train them with the same trees, ensembles and target"
            )
        logits = jnp.zeros((batch, self.prompts, self.target.vocab_size), jnp.float32)
        return PPDState(logits, jnp.full((batch,), -1, jnp.int32))

    def axes(self, draft):
        return PPDState(("batch", None, "vocab"), ("batch",))

    def begun(self, params, draft, view) -> PPDState:
        """The state of rows that have already proposed, and the prompt tokens' predictions in rows that have not."""
        count, size = self.prompts * self.ensembles, params["draft"]["embeddings"].shape[-1]
        fresh = (draft.state < 0) & view.live & (view.length > 1)

        def read(logits):
            step, member = jnp.divmod(jnp.arange(count), self.ensembles)
            visible = (member[:, None] == member[None]) & (step[None] <= step[:, None])
            shape, base = (view.length.shape[0], count), view.length - 1
            embeddings = jnp.broadcast_to(params["draft"]["embeddings"].reshape(1, count, size), (*shape, size))
            tokens, positions = jnp.zeros(shape, jnp.int32), base[:, None] + step[None]
            block = Block(tokens, positions, base, visible[None], embeddings, jnp.ones(shape, bool))
            said = self.target(params["target"], block, view.cache, wants=Wants(logits=True)).logits
            said = said.reshape(-1, self.prompts, self.ensembles, said.shape[-1]).mean(axis=2)
            return jnp.where(fresh[:, None, None], said, logits)

        logits = jax.lax.cond(jnp.any(fresh), read, lambda logits: logits, draft.logits)
        return PPDState(logits, jnp.where(fresh, self.prompts, jnp.maximum(draft.state, 0)))

    def propose(self, params, draft, view, sampler):
        draft = self.begun(params, draft, view)
        table = jax.tree.map(lambda x: jnp.asarray(x)[draft.state], vars(self.tables))
        batch = draft.state.shape[0]
        width = 1 + int(self.tables.rank.max())
        depths = jnp.broadcast_to(jnp.arange(self.prompts)[None], (batch, self.prompts))
        scores = sampler.scores(draft.logits, depths, None, self.prompts - 1)
        values, ids = jax.lax.top_k(scores, width)
        flat = lambda x: x.reshape(batch, -1)  # noqa: E731
        pick = jnp.maximum(table["depth"] - 1, 0) * width + table["rank"]
        is_root = table["depth"] == 0
        tokens = jnp.where(is_root, view.root[:, None], jnp.take_along_axis(flat(ids), pick, axis=1))
        known = is_root | (jnp.take_along_axis(flat(values), pick, axis=1) > -jnp.inf)
        valid = jnp.all((known & table["real"])[:, None, :] | ~table["above"], axis=-1)
        tree = Tree(
            tokens=jnp.where(valid, tokens, -1).astype(jnp.int32),
            parent=table["parent"],
            depth=table["depth"],
            valid=valid,
            max_depth=self.depth,
        )
        extra = Extra(
            tokens=jnp.zeros((batch, self.slots), jnp.int32),
            positions=view.length[:, None] - 1 + table["position"],
            visible=table["visible"],
            embeddings=params["draft"]["embeddings"][table["step"], table["member"]],
        )
        return Proposal(tree, draft, extra)

    def observe(self, params, draft, proposal, output, verdict):
        leaf = jnp.take_along_axis(verdict.path, verdict.accepted[:, None], axis=1)[:, 0]
        count = self.prompts * self.ensembles
        first = jnp.asarray(self.tables.first)[draft.state, leaf]
        slots = self.nodes + jnp.minimum(first[:, None] + jnp.arange(count)[None], self.slots - 1)
        logits = jnp.take_along_axis(output.logits, slots[:, :, None], axis=1)
        logits = logits.reshape(-1, self.prompts, self.ensembles, logits.shape[-1]).mean(axis=2)
        return PPDState(logits, jnp.asarray(self.tables.prompts)[draft.state, leaf])
