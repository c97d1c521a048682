"""A draft head over fewer tokens than the target knows (VocabTrim, arXiv:2506.22694)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import LM, Draw, Output, Wants
from specjax.models.few_bits import padded_rows

Array = jax.Array


def params_dtype(params: Any) -> Any:
    """The type of a head's parameters (ids apart), in which its products are computed."""
    return next(x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating))


def head_kernel(lm: LM, params: Any, ids: Array | None = None) -> Array:
    """`[E, U]`: the columns `ids` `[U]` of a model's language-model head, or all columns without `ids`; no soft cap and
    no bias of its logits.
    """
    params = _without_bias(params)
    width = jax.eval_shape(lambda p: lm.embed(p, jnp.zeros((1, 1), jnp.int32)), params)
    near = 2.0**-10  # a soft cap changes nothing so close to zero
    kernel = lm.unembed(params, near * jnp.eye(width.shape[-1], dtype=width.dtype)[None])[0] / near
    return kernel.astype(width.dtype) if ids is None else kernel[:, ids].astype(width.dtype)


def head_columns(lm: LM, params: Any, ids: Array) -> dict[str, Array]:
    """`kernel` `[E, U]`, the columns `ids` `[U]` of a model's head, and `bias` `[U]` if it has one."""
    own: dict[str, Array] = {"kernel": head_kernel(lm, params, ids)}
    if any(_is_bias(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)):
        still = jnp.zeros((1, 1, own["kernel"].shape[0]), own["kernel"].dtype)
        own["bias"] = lm.unembed(params, still)[0, 0, ids].astype(own["kernel"].dtype)
    return own


def _is_bias(path: tuple[Any, ...]) -> bool:
    return [getattr(key, "key", None) for key in path[-2:]] == ["head", "bias"]


def _without_bias(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: jnp.zeros_like(x) if _is_bias(path) else x, params)


def draft_logits(target: LM, params: Any, h: Array) -> Array:
    """A draft's distribution `[..., U]` float32 from features `[..., E]`, by its own `head` or, without one, the target's.

    Args:
      target: the target LM.
      params: {"target": ..., "draft": ...}.
      h: the input of the head.
    """
    head = params["draft"].get("head")
    if head is None:
        return target.unembed(params["target"], h)
    return with_bias(head_scores(h, head["kernel"]), head)


def with_bias(logits: Array, head: dict[str, Array]) -> Array:
    """Logits `[..., U]` with the head's `bias` `[U]`, if it has one."""
    if "bias" not in head:
        return logits
    return logits + jnp.reshape(head["bias"].astype(jnp.float32), (1,) * (logits.ndim - 1) + (-1,))


@jax.custom_vjp
def head_scores(h: Array, kernel: Array) -> Array:
    """`[..., U]` float32, features `[..., E]` times the kernel `[E, U]`.

    Products are in the features' type, also in the gradients; sums are in float32.
    """
    product = lambda h: jnp.matmul(h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)
    return padded_rows(product, h)


def _scores_and_operands(h, kernel):
    return head_scores(h, kernel), (h, kernel)


def _operands_gradients(operands, gradient):
    h, kernel = operands
    g = gradient.astype(h.dtype)
    of_h = jnp.einsum("...u,eu->...e", g, kernel.astype(h.dtype), preferred_element_type=jnp.float32)
    of_kernel = jnp.einsum("...e,...u->eu", h, g, preferred_element_type=jnp.float32)
    return of_h.astype(h.dtype), of_kernel.astype(kernel.dtype)


head_scores.defvjp(_scores_and_operands, _operands_gradients)


def with_head(
    run: Callable[[Wants], Output], unembed: Callable[[Array], Array], wants: Wants, draw: Draw | None
) -> Output:
    """The result of an LM wrapped around another whose logits are computed in a different way.

    Args:
      run: the other model's pass.
      unembed: from its final hidden states `[B, T, E]` to logits.
      wants: what is asked of the wrapper.
      draw: see `specjax.lm.LM`.
    """
    body = dataclasses.replace(wants, logits=False, topk=0, draw=False, final=wants.final or wants.head)
    output = run(body)
    if not wants.head:
        return output
    logits = unembed(output.final)
    return dataclasses.replace(
        output,
        logits=logits if wants.logits else None,
        topk=jax.lax.top_k(logits, wants.topk) if wants.topk else None,
        draw=draw(logits) if wants.draw and draw is not None else None,
        final=output.final if wants.final else None,
    )


def check_ids(ids: Any, vocab_size: int) -> np.ndarray:
    """Draft ids `[U]`, checked.

    Raises:
      ValueError: if they are not increasing target ids.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"the draft vocabulary must be a list of target ids, got shape {ids.shape}, {ids.dtype}")
    if (np.diff(ids) <= 0).any():
        at = int(np.argmax(np.diff(ids) <= 0))
        raise ValueError(
            f"the draft vocabulary must be increasing target ids; entry {at + 1} ({ids[at + 1]}) is not above {ids[at]}"
        )
    if ids[0] < 0 or ids[-1] >= vocab_size:
        bad = ids[0] if ids[0] < 0 else ids[-1]
        raise ValueError(f"the draft vocabulary names token {bad}, the target has 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def most_frequent(counts: Any, keep: int, always: tuple[int, ...] = ()) -> np.ndarray:
    """The `keep` most frequent ids of a corpus, increasing; on a tie the lower id wins.

    Args:
      counts: `[V]`, how often each id occurs.
      keep: U.
      always: ids that are kept whatever their count, such as the end of text.

    Raises:
      ValueError: if `keep` is not between the number of `always` and V.
    """
    counts = np.asarray(counts, np.int64).copy()
    if not max(len(set(always)), 1) <= keep <= counts.size:
        raise ValueError(f"cannot keep {keep} of {counts.size} tokens ({len(set(always))} of them always)")
    counts[list(always)] = counts.max() + 1
    order = np.argsort(-counts, kind="stable")[:keep]
    return np.sort(order).astype(np.int32)
