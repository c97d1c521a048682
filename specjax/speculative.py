"""The autoregressive step: draft, expand, verify, accept.

In the shape descriptions `B` denotes rows, `R` inserted rows, `N` tree nodes, `D` the deepest node, `L` the text buffer.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from specjax.decoder import Decoder, Needs
from specjax.draft.base import Chunk, Drafter, Proposal, View
from specjax.draft.none import NoDrafter
from specjax.kernels.kv_commit.xla import SHORT, laid_over
from specjax.lm import LM, Block, Output, Source, Wants, check_answered, dtype_of, encodes
from specjax.names import named
from specjax.pretty import Pretty
from specjax.prompts import Prompts
from specjax.sampling import Sampler
from specjax.sampling.processors import Processor, checked
from specjax.sampling.warp import carries, walked
from specjax.sampling_params import SamplingArrays
from specjax.sharding.ambient import on_mesh
from specjax.sharding.mesh import make_mesh
from specjax.sharding.rules import constrain, parts, rounded, shardings
from specjax.state import DecodeState, LogProbs, Prefix, Stats, finish_rows
from specjax.tree import Tree
from specjax.verify import Coupled, Verdict, Verifier

Array = jax.Array
PyTree = Any

PREFILL_WIDTHS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def prefill_width(prompt_length: int, parts: int = 1) -> int:
    """The width of a record's prefill chunks: they are as few as the widest would be, and all of one width of `PREFILL_WIDTHS`.

    It depends on the record's length alone, so its numbers do not depend on what else is in the batch. Records of one
    width may be inserted together.

    Args:
      prompt_length: its tokens.
      parts: into how many parts a mesh splits a chunk's tokens; each part has this width.
    """
    share = -(-(prompt_length - 1) // parts)
    chunks = max(1, -(-share // PREFILL_WIDTHS[-1]))
    return parts * next(width for width in PREFILL_WIDTHS if width * chunks >= share)


def prefill_columns(longest: int, width: int, capacity: int, begin: int = 1) -> int:
    """The columns in which prompts enter: a power of two of chunks where the buffer holds so many, for few compiled shapes.

    Only the chunks that the longest prompt needs are read.

    Args:
      longest: the tokens of the longest prompt.
      width: of a chunk.
      capacity: the columns of the buffer.
      begin: one more than the tokens that were read before, as a prefix.
    """
    chunks = max(1, -(-(longest - begin) // width))
    rounded = 1 << (chunks - 1).bit_length()
    return begin + width * (rounded if begin + width * rounded <= capacity else chunks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInfo(Pretty):
    """The record of one step; the next step does not need it.

    Attributes:
      verdict: the accepted path, the step's tokens, and how many of them were committed.
      tree: the proposed tree, without `log_q`.
    """

    verdict: Verdict
    tree: Tree


@dataclasses.dataclass(frozen=True)
class Speculative(Decoder[DecodeState]):
    """An autoregressive decoder. Static and hashable: pure functions `init` (or `empty`, `insert`) and `step`; see `Decoder`.

    `params` is `{"target": ..., "draft": ...}`, and `"verify"` if the verifier has parameters. Nothing here is jitted;
    `specjax.decoder.run` and `stream` are.

    Attributes:
      target: the model.
      drafter: bound to the target.
      verifier: the acceptance rule.
      logprobs: whether to keep log-probabilities of the emitted text.
      mesh: the device mesh that params and state are laid out on, or None.
      processors: the user's own warpers (`specjax.sampling.Processor`), after the logit warpers and before the
        temperature.
      greedy: whether no row uses a warper. Then no warper is compiled, and the rows' options are not looked at again.
      whole: whether the target reads all nodes of every proposal, with one program instead of one for each of the
        drafter's rungs.
    """

    target: LM
    drafter: Drafter
    verifier: Verifier
    logprobs: bool = False
    mesh: jax.sharding.Mesh | None = None
    processors: tuple[Processor, ...] = ()
    greedy: bool = False
    whole: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Decoder.needs`."""
        own = (("draft", self.drafter.needs_params), ("verify", self.verifier.needs_params))
        return ("target", *(name for name, has in own if has))

    def fitted(self, needs: Needs) -> Self:
        """See `Decoder.fitted`."""
        return dataclasses.replace(self, greedy=needs.greedy, whole=needs.brief and len(self.rungs) > 1)

    def with_rings(self) -> Self:
        """This decoder for rows that only move forward. The text is the same.

        Layers of the target with a window keep only the part of the text that a step sees, instead of all of it. A
        cache that forgets (`specjax.models.caches`) has what it needs.

        A caller that sets a row's `length` back loses the window.

        Raises:
          ValueError: if the target has no rings; or if the drafter goes back in a text and the cache forgets.
        """
        target: Any = self.target
        if not has_rings(target):
            raise ValueError(f"a {type(target).__name__} keeps all of every layer's cache: leave rings out")
        if math.isinf(self.drafter.looks_back):
            if target.old is not None:
                raise ValueError(
                    f"the drafter {type(self.drafter).__name__} reads all of its target's cache, and "
                    f"{type(target.old).__name__} forgets: leave one out"
                )
            return self
        if not (target.has_windows or target.old):
            return self
        # a cache that forgets reads prompts whole
        width = parts(self.mesh, "tokens") * PREFILL_WIDTHS[-1] if target.old is None else 1
        ahead = max(self.drafter.depth + 1, width) + int(self.drafter.looks_back)
        return dataclasses.replace(self, target=dataclasses.replace(target, ahead=ahead))

    @property
    def rungs(self) -> tuple[int, ...]:
        """Static: how many nodes the target may read, ascending; one program is compiled for each.

        On a CPU these are the drafter's rungs. An accelerator reads all weights however few the nodes, so there it is
        the fewest and all of them, which compiles in half the time. A drafter that weighs its rungs against each other
        keeps them all.
        """
        every = self.drafter.rungs
        if self.whole:
            return every[-1:]
        platform = jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform
        return every if platform == "cpu" or self.drafter.weighs_rungs else (*every[:1], *every[1:][-1:])

    def axes(self, state: DecodeState) -> DecodeState:
        """Logical axis names of every leaf of the state."""
        axes = jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), state)
        return dataclasses.replace(
            axes, cache=self.target.cache_axes(state.cache), draft=self.drafter.axes(state.draft)
        )

    def param_shardings(self, params: PyTree) -> PyTree:
        """The sharding of every parameter on the mesh: `jax.device_put(params, decoder.param_shardings(params))`.

        Raises:
          ValueError: if there is no mesh.
        """
        if self.mesh is None:
            raise ValueError("this decoder has no mesh: make it with specjax.speculative(..., mesh=...)")
        target = params["target"]
        verify = {name: params[name] for name in ("verify",) if name in params}
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        return {
            "target": shardings(self.mesh, self.target.axes(target), target, self.target.axis_counts()),
            "draft": self.drafter.param_shardings(self.mesh, params["draft"]),
            **jax.tree.map(lambda leaf: whole, verify),
        }

    def _constrain(self, state: DecodeState) -> DecodeState:
        return constrain(self.mesh, self.axes(state), state)

    @property
    def reads_prefix(self) -> bool:
        return True

    @property
    def obeys(self) -> bool:
        """See `Decoder.obeys`: what the target's warpers have removed passes no rule, and is never drawn."""
        return True

    @property
    def encodes(self) -> bool:
        """See `Decoder.encodes`."""
        return encodes(self.target)

    @property
    def slack(self) -> int:
        """See `Decoder.slack`: a step writes D + 1 tokens before it drops the rest."""
        return self.drafter.depth + 1

    def empty(
        self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1
    ) -> DecodeState:
        """See `Decoder.empty`."""
        capacity = rounded(self.mesh, "slots", capacity)
        dtype = cache_dtype or jax.tree.leaves(params["target"])[0].dtype
        buffer = lambda: jnp.zeros((batch, capacity), jnp.float32)
        state = DecodeState.blank(
            batch,
            capacity,
            self.drafter.depth,
            eos_width,
            length=1,
            cache=self.target.init_cache(batch, capacity, dtype),
            draft=self.drafter.init(params, batch, capacity),
            logprobs=LogProbs(buffer(), buffer(), buffer(), buffer()) if self.logprobs else None,
        )
        return self._constrain(state.drawing(state.sampling))

    def prefill(
        self, params: PyTree, state: DecodeState, prompts: Prompts, prefix: Prefix | None = None
    ) -> DecodeState:
        """See `Decoder.prefill`: reads all but each prompt's last token, after the prefix if there is one.

        A target with an encoder reads the sources before that. Rows of one `prefill_width` belong together.
        """
        count, size = prompts.tokens.shape
        capacity, lengths = state.tokens.shape[1], jnp.asarray(prompts.lengths)
        begin = 1 if prefix is None else prefix.length
        width = min(self._width(size - begin + 1, prompts.width), capacity)
        kept = min(size, capacity)
        slots = min(capacity, -(-max(kept - begin, 1) // width) * width) if prefix is None else None
        fresh = self._fresh(params, state, count, prefix, slots)
        fresh = dataclasses.replace(
            fresh,
            tokens=fresh.tokens.at[:, :kept].set(prompts.tokens[:, :kept]),
            length=lengths,
            finish=jnp.zeros((count,), jnp.int32),
            key=prompts.keys,
            prompt_length=lengths,
            limit=jnp.clip(
                prompts.limit, lengths, capacity - self.slack
            ),  # slice updates beyond it clamp without an error
            eos=prompts.ends(state.eos.shape[1]),
        ).drawing(prompts.sampling)
        if prompts.source is not None:
            fresh = self._encoded(params, fresh, prompts.source)
        fresh = self._read_parts(params, fresh, begin, size, width)
        return dataclasses.replace(fresh, cache=self.target.begin(params["target"], fresh.cache, lengths))

    @on_mesh
    def read_prefix(self, params: PyTree, state: DecodeState, tokens: Array) -> tuple[DecodeState, Prefix]:
        """Reads a prefix that many prompts share once, for `insert`.

        All but its last token are prefilled, as for a prompt: what a drafter computes for a token may depend on the
        next one.

        Args:
          params: the parameters.
          state: the state of B rows, which stay as they are; the part that they share learns from the prefix.
          tokens: `[n]` int32, at most L.

        Returns:
          The state, and the prefix.

        Raises:
          ValueError: for a target with an encoder, whose rows differ from the first token on.
        """
        if self.encodes:
            raise ValueError(
                "prompts of a target with an encoder share no prefix, since each has its own source: leave it out"
            )
        size = tokens.shape[0]
        row = self._fresh(params, state, 1)
        row = dataclasses.replace(
            row, tokens=row.tokens.at[:, :size].set(tokens[None]), length=jnp.full((1,), size, jnp.int32)
        )
        row = self._constrain(self._read_parts(params, row, 1, size, min(self._width(size), row.tokens.shape[1])))
        return self._apart(state, row, size)

    @on_mesh
    def read_on(
        self, params: PyTree, state: DecodeState, prefix: Prefix, begin: Array, end: Array, width: int
    ) -> tuple[DecodeState, Prefix]:
        """See `Decoder.read_on`."""
        row = dataclasses.replace(self._fresh(params, state, 1, prefix), length=jnp.reshape(end, (1,)))
        cache, draft = self._read_chunk(params, row, begin, width, (row.cache, row.draft))
        return self._apart(state, self._constrain(dataclasses.replace(row, cache=cache, draft=draft)), prefix.length)

    def _apart(self, state, row, length) -> tuple[DecodeState, Prefix]:
        """The state with what the part that its rows share has learnt in a row, and the rest of the row as a prefix."""
        axes = self.axes(state).draft
        learnt = jax.tree.map(lambda old, new, axes: old if axes[0] == "batch" else new, state.draft, row.draft, axes)
        own = jax.tree.map(lambda new, axes: new if axes[0] == "batch" else jnp.zeros((), new.dtype), row.draft, axes)
        state = self._constrain(dataclasses.replace(state, draft=learnt))
        return state, Prefix(row.tokens, row.cache, own, length)

    def prefix_axes(self, prefix: Prefix) -> Prefix:
        """See `Decoder.prefix_axes`."""
        axes = self.target.cache_axes(prefix.cache), self.drafter.axes(prefix.draft)
        return Prefix(("batch", None), *axes, prefix.length)  # type: ignore[arg-type]

    def _encoded(self, params, state, source: Source):
        """The rows after the target and the drafter have read their sources."""
        with jax.named_scope("encode"):
            cache = self.target.encode(params["target"], state.cache, source)
            draft = self.drafter.encode(params, state.draft, source, self.target.source(cache))
        return self._constrain(dataclasses.replace(state, cache=cache, draft=draft))

    def _width(self, prompt_length, asked=None):
        """Tokens per prefill chunk: as asked, or the record's own."""
        return asked or prefill_width(prompt_length, parts(self.mesh, "tokens"))

    def _fresh(self, params, state, count, prefix: Prefix | None = None, slots: int | None = None):
        """`count` rows before their prefill, or after that of a prefix; the shared part comes from the state.

        `slots` is what their prompts need where the model forgets, None for as many as the state has.
        """
        dtype = dtype_of(state.cache)
        fresh = self.empty(params, count, state.tokens.shape[1], dtype, state.eos.shape[1])
        fresh = self._constrain(
            dataclasses.replace(fresh, cache=self.target.reading(fresh.cache, slots or fresh.tokens.shape[1]))
        )
        if prefix is not None:
            repeat = lambda old, row: jnp.broadcast_to(row, old.shape) if row.ndim else old
            own = ("tokens", "cache", "draft")
            copies = {name: jax.tree.map(repeat, getattr(fresh, name), getattr(prefix, name)) for name in own}
            fresh = self._constrain(dataclasses.replace(fresh, **copies))
        shared = lambda old, new, axes: new if axes[0] == "batch" else old
        # the shared part learns from prompts too
        draft = jax.tree.map(shared, state.draft, fresh.draft, self.axes(state).draft)
        return dataclasses.replace(fresh, draft=draft)

    def _read_parts(self, params, state, begin, size, width):
        """Runs the target over columns `begin` - 1 to `size` - 2, or to the last that a row has, in chunks. Makes no logits."""
        first, capacity = begin - 1, state.tokens.shape[1]
        chunk = functools.partial(self._read_chunk, params, state)
        carry = state.cache, state.draft
        chunks = -(-(min(size, capacity) - begin) // width)
        whole = min(chunks, (capacity - first) // width)
        if whole == 1:
            carry = chunk(first, width, carry)
        elif whole > 1:
            needed = -(-(jnp.max(state.length) - begin) // width)  # not static, so that few programs are compiled
            read = lambda i, carry: chunk(first + i * width, width, carry)
            carry = jax.lax.fori_loop(0, jnp.minimum(whole, needed), read, carry)
        if whole < chunks:  # a whole chunk would reach past the buffer, where slice updates clamp
            carry = chunk(first + whole * width, capacity - first - whole * width, carry)
        return dataclasses.replace(state, cache=carry[0], draft=carry[1])

    def _read_chunk(self, params, state, start, width, carry):
        """The target's cache and the drafter's state after `width` columns of every row's prompt, from `start` on."""
        cache, draft = carry
        columns = start + jnp.arange(width)
        tokens = jnp.take(state.tokens, columns, axis=1, mode="clip")
        positions = jnp.broadcast_to(columns[None], tokens.shape)
        real = positions < state.length[:, None] - 1
        # after its prompt a row writes garbage, never far behind, which its length hides
        block = Block(tokens, positions, jnp.minimum(start, state.length - 1), split=True)
        output = self.target(params["target"], block, cache, wants=self.drafter.prefill_wants)
        counts = real.sum(axis=1, dtype=jnp.int32)
        cache = self.target.commit(cache, output.delta, None, block.length, counts)
        following = jnp.take(state.tokens, columns + 1, axis=1, mode="clip")
        return cache, self.drafter.prefill(params, draft, Chunk(block, real, following), output)

    @on_mesh
    def step(self, params: PyTree, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """One target pass: every live row commits at least one token."""
        view, sampler = self._begun(state)
        with jax.named_scope("draft"):
            drafting = dataclasses.replace(sampler, drafting=True)
            proposal = self.drafter.propose(params, state.draft, view, drafting)
        with jax.named_scope("target"):
            output = self._read(params, proposal, view, sampler)
        with jax.named_scope("verify"):
            verdict = self.verifier.given(params.get("verify"))(output, proposal.tree, sampler)
            output = output.first(proposal.slots)  # the slots that only the verifier reads are no longer needed
        with jax.named_scope("accept"):
            return self._accept(params, state, proposal, output, verdict, sampler)

    def _begun(self, state: DecodeState) -> tuple[View, Sampler]:
        """What a step reads from the state, and what determines its draws."""
        live = ~state.done
        view = View(
            state.tokens,
            state.length,
            live,
            state.cache,
            max_depth=self.drafter.depth,
            keep_q=self.verifier.keep_q,
            source=self.target.source(state.cache) if self.encodes else None,
        )
        sampler = Sampler(
            state.key,
            state.tokens,
            state.length,
            live,
            state.sampling,
            processors=self.processors,
            greedy=self.greedy,
            begin=state.prompt_length,
            eos=state.eos,
            carried=state.carried,
            limit=state.limit,
        )
        return view, sampler.once() if self.verifier.own_noise else sampler

    def _read(self, params, proposal: Proposal, view: View, sampler: Sampler) -> Output:
        """Runs the target over the proposal, or over as many of its first nodes as the live rows need."""
        wants = self.verifier.wants | self.drafter.wants | Wants(logits=self._keeps_logits(sampler.params))
        nodes = proposal.tree.nodes
        extra = self.verifier.extra(proposal.tree, sampler)
        proposal = proposal.beside(extra)
        rungs = (nodes,) if extra is not None else self.rungs

        def read(rung):
            part = proposal.prefix(rung)
            tree = part.tree

            def draw(logits):
                return sampler.draw(logits[:, :rung], tree.depth, tree.path_tokens, tree.max_depth)

            output = self.target(
                params["target"], part.block(view), view.cache, wants=wants, draw=draw, partial=part.partial
            )
            output = check_answered(self.target, output, wants)
            if rung == nodes:
                return output
            pad = lambda x: jnp.pad(x, ((0, 0), (0, nodes - rung)) + ((0, 0),) * (x.ndim - 2))
            return jax.tree.map(pad, output)

        if len(rungs) == 1:
            return read(nodes)
        used = jnp.max(jnp.where(proposal.tree.valid & view.live[:, None], 1 + jnp.arange(nodes)[None], 0))
        index = jnp.sum(used > jnp.asarray(rungs[:-1]))
        return jax.lax.switch(index, [functools.partial(read, rung) for rung in rungs])

    def _keeps_logits(self, sampling: SamplingArrays) -> bool:
        return self.logprobs or (carries(sampling) and not self.greedy)

    def _accept(self, params, state, proposal: Proposal, output: Output, verdict: Verdict, sampler: Sampler):
        tree = proposal.tree
        emitted = emitted_tokens(tree.tokens, verdict)
        verdict, finish = commit_counts(state, emitted, verdict)
        src = None if tree.is_chain and output_is_tree(output, tree.nodes) else jnp.maximum(verdict.path, 0)
        logprobs = state.logprobs
        if logprobs is not None:
            logprobs = self._log_probs(logprobs, state.length, tree, output, verdict, emitted, sampler)
        carried = self._carried(state, tree, output, verdict, emitted, sampler)
        # The place of the path does not depend on the verdict. XLA is made to believe that it does: then it knows that the
        # write comes after every read of the cache, and it updates the cache in place instead of copying it at each step.
        after = jnp.where(verdict.committed >= 0, state.length - 1, 0)
        with jax.named_scope("commit"):
            cache = self.target.commit(state.cache, output.delta, src, after, verdict.committed)
        with jax.named_scope("observe"):
            draft = self.drafter.observe(params, proposal.draft, proposal, output, verdict)
        live = (~state.done).astype(jnp.int32)
        stats = Stats(
            state.stats.steps + live,
            state.stats.accepted
            + live[:, None] * (jnp.arange(state.stats.accepted.shape[1])[None] == verdict.accepted[:, None]),
        )
        new = dataclasses.replace(
            state,
            tokens=write(state.tokens, emitted, state.length),
            length=state.length + verdict.committed,
            finish=finish,
            stats=stats,
            cache=cache,
            draft=draft,
            logprobs=logprobs,
            carried=carried,
        )
        return self._constrain(new), StepInfo(verdict, dataclasses.replace(tree, log_q=None))

    def _carried(self, state, tree, output, verdict, emitted, sampler):
        if self.greedy:
            return state.carried
        carried = walked(state.sampling, state.carried, emitted, verdict.committed)
        if not carries(state.sampling):
            return carried
        nodes = jnp.maximum(verdict.path, 0)[:, :, None]

        def after():
            logits = jnp.take_along_axis(output.logits, nodes, axis=1)
            paths = lambda: jnp.take_along_axis(tree.path_tokens(), nodes, axis=1)
            return {**carried, **sampler.after(logits, paths, emitted, verdict.committed)}

        sampled = jnp.any(sampler.live & (state.sampling.temperature > 0))
        return jax.lax.cond(sampled, after, lambda: carried)

    def _log_probs(self, logprobs, length, tree, output, verdict, emitted, sampler):
        nodes = jnp.maximum(verdict.path, 0)[:, :, None]
        at = jnp.maximum(emitted, 0)[:, :, None]
        pick = lambda scores: jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), at, axis=2)[:, :, 0]
        logits = jnp.take_along_axis(output.logits, nodes, axis=1)
        paths = lambda: jnp.take_along_axis(tree.path_tokens(), nodes, axis=1)
        even = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1) - jnp.log(logits.shape[-1])
        heat = sampler.params.temperature[:, None, None]
        tempered = logits / jnp.where(heat > 0, heat, 1.0)
        return LogProbs(
            write(logprobs.raw, pick(logits), length),
            write(logprobs.tempered, pick(tempered), length),
            write(logprobs.warped, pick(sampler.warped(logits, paths)), length),
            write(logprobs.certainty, even, length),
        )


@named
def speculative(
    target: LM,
    drafter: Drafter | None = None,
    verifier: Verifier | None = None,
    *,
    logprobs: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    processors: Sequence[Processor] = (),
) -> Speculative:
    """A decoder from its parts; plain decoding without a drafter. `mesh` comes from `specjax.sharding.make_mesh`.

    Layers of the target with a window keep all of the text in the cache, so that rows may go back in it;
    `Speculative.with_rings` is for rows that only move forward.

    Raises:
      ValueError: if the drafter cannot serve the target, or the verifier cannot judge the drafter; for a mesh with
        other axes; or for processors that return no logits.
      TypeError: for a drafter or a verifier that is not an object, such as a line of text.
    """
    for given, kind, home in ((drafter, Drafter, "draft"), (verifier, Verifier, "verify")):
        if given is not None and not isinstance(given, kind):
            raise TypeError(
                f"{given!r} is not a specjax.{home}.{kind.__name__}; specjax.Engine(model, line) takes a line of text, "
                "and has the decoder and the params that it stands for"
            )
    verifier = (verifier or Coupled()).bind(target)
    drafter = (drafter or NoDrafter()).bind(target).recording(verifier.keep_q)
    verifier.check(drafter)
    return Speculative(target, drafter, verifier, logprobs, make_mesh(mesh), checked(processors, target.vocab_size))


def has_rings(target: LM) -> bool:
    """Whether `Speculative.with_rings` takes a target; a target that reads another text beside its own keeps everything."""
    return dataclasses.is_dataclass(target) and "ahead" in {field.name for field in dataclasses.fields(target)}


def output_is_tree(output: Output, nodes: int) -> bool:
    """Static: whether the block held exactly the tree's nodes, without extra slots."""
    return jax.tree.leaves(output.delta)[0].shape[1] == nodes


def emitted_tokens(tokens: Array, verdict: Verdict) -> Array:
    """A step's tokens `[B, D + 1]`: the accepted path below the root, then the target's own token; -1 after that.

    Args:
      tokens: `[B, N]`, the tree's.
      verdict: the step's.
    """
    steps = jnp.arange(verdict.path.shape[1])[None]
    below = jnp.roll(verdict.path, -1, axis=1)
    drafted = jnp.take_along_axis(tokens, jnp.maximum(below, 0), axis=1)
    accepted = verdict.accepted[:, None]
    return jnp.where(steps < accepted, drafted, jnp.where(steps == accepted, verdict.next_token[:, None], -1))


def commit_counts(state: DecodeState, emitted: Array, verdict: Verdict) -> tuple[Verdict, Array]:
    """Cuts a step's tokens at the first EOS, at the row's limit and at a failed draw.

    Returns:
      The verdict with `committed` and `emitted` filled in, and the rows' new `finish` `[B]`.
    """
    live = ~state.done
    steps = jnp.arange(emitted.shape[1])[None]
    failed = verdict.next_token < 0
    count = verdict.accepted + jnp.where(failed, 0, 1)
    ends = jnp.any(emitted[:, :, None] == state.eos[:, None, :], axis=2) & (emitted >= 0) & (steps < count[:, None])
    ended = ends.any(axis=1)
    upto_eos = jnp.where(ended, jnp.argmax(ends, axis=1) + 1, count)
    room = state.limit - state.length
    committed = jnp.where(live, jnp.minimum(upto_eos, room), 0).astype(jnp.int32)
    finish = finish_rows(state, state.length + committed, ended & (upto_eos <= room), failed)
    return dataclasses.replace(verdict, committed=committed, emitted=emitted), finish


def write(buffer: Array, values: Array, start: Array) -> Array:
    """Writes `[B, M]` values into `[B, L]` rows from `start` `[B]` on; `start` must not be negative."""
    update = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    ways = {} if values.shape[1] > SHORT else {"tpu": laid_over}
    return jax.lax.platform_dependent(buffer, values.astype(buffer.dtype), start, **ways, default=update)
