"""Faults to plant: what goes wrong, the place in the source, and the fast tests that are to catch it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """One change of one source file.

    Attributes:
      says: what goes wrong.
      file: that it is planted in, from the root of the repository.
      right: what stands there, once.
      wrong: what is put in its place.
      tests: ids of tests of the fast set; one of them has to fail.
    """

    says: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """The module that the file is."""
        return self.file.removesuffix(".py").replace("/", ".")


class Gone(ValueError):
    """The place of a fault is not there any more, or is there more than once."""


def planted(fault: Fault, source: str) -> str:
    """The source of the fault's file, with it.

    Raises:
      Gone: where its place is gone.
    """
    if (count := source.count(fault.right)) != 1:
        raise Gone(f"{fault.file} has {fault.right!r} {count} times, and a fault is planted where it stands once")
    return source.replace(fault.right, fault.wrong)


def _of(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{file}.py::{name}" for name in names)


DRAFTERS, VERIFIERS = "guarantees/test_drafters", "guarantees/test_verifiers"
SAME_TEXT = "test_it_writes_plain_decodings_text"
VERIFIER = "test_a_verifier_keeps_its_guarantee"

FAULTS = {
    # ---- what is accepted
    "residual": Fault(
        "a rejected token is replaced by a draw from p, not from what q leaves of it",
        "specjax/verify/rejection.py",
        "left = jnp.maximum(p_here - jnp.take_along_axis(proposed, here, axis=1)[:, 0], 0.0)",
        "left = p_here",
        _of(VERIFIERS, f"{VERIFIER}[rejection]"),
    ),
    "path": Fault(
        "the accepted path begins at the root and not below it",
        "specjax/speculative.py",
        "below = jnp.roll(verdict.path, -1, axis=1)",
        "below = verdict.path",
        _of(DRAFTERS, f"{SAME_TEXT}[draft-chain]"),
    ),
    "eos": Fault(
        "a text goes on after an EOS inside an accepted path",
        "specjax/speculative.py",
        "upto_eos = jnp.where(ended, jnp.argmax(ends, axis=1) + 1, count)",
        "upto_eos = count",
        _of(DRAFTERS, f"{SAME_TEXT}[draft-chain]"),
    ),
    "limit": Fault(
        "a text is a token longer than its limit",
        "specjax/speculative.py",
        "room = state.limit - state.length",
        "room = state.limit - state.length + 1",
        _of(DRAFTERS, f"{SAME_TEXT}[draft-chain]"),
    ),
    # ---- noise and rows
    "row key": Fault(
        "all rows have the first one's key",
        "specjax/speculative.py",
        "key=prompts.keys,",
        "key=jnp.broadcast_to(prompts.keys[:1], prompts.keys.shape),",
        _of(DRAFTERS, f"{SAME_TEXT}[none]"),
    ),
    "position key": Fault(
        "all positions of a row share one key",
        "specjax/sampling/noise.py",
        "return jax.random.fold_in(jax.random.fold_in(key, position), purpose)",
        "return jax.random.fold_in(key, purpose)",
        _of(VERIFIERS, f"{VERIFIER}[coupled]"),
    ),
    "purpose key": Fault(
        "drafts, tests of them and what replaces them share one key",
        "specjax/sampling/noise.py",
        "return jax.random.fold_in(jax.random.fold_in(key, position), purpose)",
        "return jax.random.fold_in(key, position)",
        _of(VERIFIERS, f"{VERIFIER}[rejection]"),
    ),
    "old noise": Fault(
        "a step decides by noise that another one has decided by",
        "specjax/verify/block.py",
        "own_noise = True",
        "own_noise = False",
        _of(VERIFIERS, f"{VERIFIER}[block]"),
    ),
    "neighbour's noise": Fault(
        "a row's drafts are tested by its neighbour's noise",
        "specjax/verify/rejection.py",
        "uniforms = sampler.uniform(tree.max_depth)",
        "uniforms = jnp.roll(sampler.uniform(tree.max_depth), 1, axis=0)",
        _of(VERIFIERS, f"{VERIFIER}[rejection]"),
    ),
    "neighbour's text": Fault(
        "a drafter copies from the text of another row",
        "specjax/draft/prompt_lookup.py",
        "jnp.take_along_axis(text, at, axis=1)",
        "jnp.take_along_axis(jnp.roll(text, 1, axis=0), at, axis=1)",
        _of(DRAFTERS, "test_a_row_does_not_depend_on_those_beside_it[prompt_lookup]"),
    ),
    "padding": Fault(
        "a row that is padding takes the last slot",
        "specjax/state.py",
        'return old.at[rows].set(new, mode="drop") if axes[:1] == ("batch",) else new',
        'return old.at[rows].set(new, mode="clip") if axes[:1] == ("batch",) else new',
        _of(DRAFTERS, "test_a_slot_is_filled_again[none]"),
    ),
    # ---- programs
    "host": Fault(
        "every step asks the host",
        "specjax/speculative.py",
        "view, sampler = self._begun(state)",
        "view, sampler = self._begun(state), jax.debug.callback(lambda length: None, state.length)\n"
        "        view, sampler = view",
        _of(DRAFTERS, "test_nothing_is_traced_again_and_nothing_asks_the_host[none]"),
    ),
    "retrace": Fault(
        "every call traces its program again",
        "specjax/decoder.py",
        "return run_program(decoder, params, state, _count(max_steps), _count(min_live))",
        "return jax.jit(lambda *given: run_program.__wrapped__(decoder, *given))(\n"
        "        params, state, _count(max_steps), _count(min_live)\n    )",
        _of(DRAFTERS, "test_nothing_is_traced_again_and_nothing_asks_the_host[none]"),
    ),
    # ---- caches and trees
    "early slot": Fault(
        "a commit begins a slot too early",
        "specjax/speculative.py",
        "after = jnp.where(verdict.committed >= 0, state.length - 1, 0)",
        "after = jnp.where(verdict.committed >= 0, state.length - 2, 0)",
        _of(DRAFTERS, f"{SAME_TEXT}[none]"),
    ),
    "few slots": Fault(
        "a commit of a tree leaves out the last slot",
        "specjax/speculative.py",
        "jnp.maximum(verdict.path, 0)\n        logprobs",
        "jnp.maximum(verdict.path, 0)[:, :-1]\n        logprobs",
        _of(DRAFTERS, f"{SAME_TEXT}[clover2]"),
    ),
    "sibling": Fault(
        "a node of a tree sees its siblings",
        "specjax/draft/base.py",
        "visible = None if tree.is_chain else tree.ancestors()",
        "visible = None if tree.is_chain else tree.ancestors() | (tree.parent[:, :, None] == tree.parent[:, None])",
        _of(DRAFTERS, f"{SAME_TEXT}[draft-static]"),
    ),
    "tree positions": Fault(
        "the nodes of a tree stand a position too far",
        "specjax/draft/base.py",
        "positions = base[:, None] + tree.depth",
        "positions = base[:, None] + tree.depth + (not tree.is_chain)",
        _of(DRAFTERS, f"{SAME_TEXT}[draft-static]"),
    ),
    "catch up": Fault(
        "a draft model's cache stays where the prompt ended",
        "specjax/draft/model.py",
        "return ModelDraft(cache, view.length), self.lm.unembed",
        "return ModelDraft(cache, draft.length), self.lm.unembed",
        _of(DRAFTERS, "test_what_is_known_of_a_text_is_what_is_known_of_a_prompt[draft-chain]"),
    ),
    "prefix": Fault(
        "a row begins a token after the end of the prefix that it shares",
        "specjax/speculative.py",
        "begin = 1 if prefix is None else prefix.length",
        "begin = 1 if prefix is None else prefix.length + 1",
        _of(DRAFTERS, "test_a_shared_prefix_is_read_once[draft-chain]"),
    ),
    "scales": Fault(
        "keys in eight bits have the scales of the neighbouring head",
        "specjax/models/attention.py",
        "key_scale=key_scale,",
        "key_scale=None if key_scale is None else jnp.roll(key_scale, 1, axis=1),",
        _of("models/test_cache_dtype", "test_a_block_reads_itself_as_the_cache_will_return_it[plain]"),
    ),
    "no slots": Fault(
        "a cache without slots is read as one that has some",
        "specjax/kernels/tree_attention/api.py",
        "empty = cache_key is None or not cache_key.shape[2]",
        "empty = cache_key is None",
        _of("kernels/test_tree_attention", "test_a_cache_without_slots_is_none[None]"),
    ),
    # ---- distributions
    "wrong node": Fault(
        "warpers see the text before a tree, and not the path to a node",
        "specjax/speculative.py",
        "return sampler.draw(logits[:, :rung], tree.depth, tree.path_tokens, tree.max_depth)",
        "return sampler.draw(logits[:, :rung], tree.depth, lambda: tree.path_tokens() * 0 - 1, tree.max_depth)",
        _of("guarantees/test_warpers", "test_same_text_as_plain[token_recycling]"),
    ),
    "no warper": Fault(
        "a draw leaves out the temperature, and the other warpers that greedy rows do without",
        "specjax/sampling/sampler.py",
        "return gumbel_argmax(self.warped(logits, paths), keys, depths - first, hot, columns=self.ids)[0]",
        "return gumbel_argmax(self.penalised(logits, paths), keys, depths - first, hot, columns=self.ids)[0]",
        _of(VERIFIERS, f"{VERIFIER}[coupled]"),
    ),
    "draft distribution": Fault(
        "a draft declares a flatter distribution than its tokens were drawn from",
        "specjax/expand/chain.py",
        "dists[depth] = drawn_from(sampler, logits, paths)[:, 0]",
        "dists[depth] = drawn_from(sampler, logits / 2, paths)[:, 0]",
        _of("guarantees/test_drafts_under_rejection", "test_texts_have_the_targets_distribution[draft-chain]"),
    ),
    "sorted siblings": Fault(
        "siblings are tried in the order of their tokens, not of their draws",
        "specjax/expand/iid.py",
        "return jnp.stack([best(scores + noise[:, :, i]) for i in range(k)], axis=2)",
        "return jnp.sort(jnp.stack([best(scores + noise[:, :, i]) for i in range(k)], axis=2), axis=2)",
        _of(VERIFIERS, f"{VERIFIER}[recursive]"),
    ),
    # ---- guarantees that are not kept
    "lossy as same text": Fault(
        "a lossy verifier declares the same text",
        "specjax/verify/fly.py",
        '"lossy",',
        '"same text",',
        _of(VERIFIERS, f"{VERIFIER}[fly]"),
    ),
    "lossy as same distribution": Fault(
        "a lossy verifier declares the same distribution",
        "specjax/verify/ears.py",
        '"lossy",',
        '"same distribution",',
        _of(VERIFIERS, f"{VERIFIER}[ears]"),
    ),
    "lossy cache as same text": Fault(
        "a lossy cache of a diffusion model declares the same text",
        "specjax/diffusion/cache/freeze.py",
        '"lossy")',
        '"same text")',
        _of("guarantees/test_caches", "test_a_cache_of_a_diffusion_model_keeps_its_guarantee[freeze]"),
    ),
    # ---- diffusion and searches
    "one too many": Fault(
        "a diffusion policy commits a position too many",
        "specjax/diffusion/unmask/fixed.py",
        "return jnp.where(step >= self.steps - 1, entry, count) if self.steps else count",
        "return jnp.where(step >= self.steps - 1, entry, count) if self.steps else count + 1",
        _of("diffusion/test_decoder", "test_equal_to_the_oracle[fixed-same]"),
    ),
    "stale canvas": Fault(
        "a diffusion cache keeps what stood at a position before a token was written there",
        "specjax/diffusion/decoder.py",
        "fresh=tokens != state.tokens,",
        "fresh=jnp.zeros_like(state.fresh),",
        _of("guarantees/test_caches", "test_what_a_cache_reuses_is_of_the_tokens_that_are_there[delayed]"),
    ),
    "length penalty": Fault(
        "beams are ranked by the length of prompt and text",
        "specjax/search/beam.py",
        "worth = jax.lax.optimization_barrier(top[:, :width] / power(length + 1 - state.prompt_length)[:, None])",
        "worth = jax.lax.optimization_barrier(top[:, :width] / power(length + 1)[:, None])",
        _of("search/test_beam", "test_wide_enough_it_finds_the_best_of_all_texts"),
    ),
}
