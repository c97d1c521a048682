"""A model that copies before it has learned anything: weights of an induction circuit (Olsson et al. 2022) to start from.

Small models spend millions of tokens until they copy a word from their context. Two layers suffice for it. A head of the first
looks at the token before and writes what it is into a part of the residual stream of its own. The heads of the second look for
the place whose token before was what theirs is now, and write the token that stands there. With these weights and a large
`copy` a model with random embeddings continues nine in ten of the random tokens that it sees for the second time. The smaller
default begins with about half of them and leaves room for what text has besides copies. All else begins by writing nothing.
"""

import torch
from torch import Tensor

from experiments.pretrain.model import Attention, Model

CONSTANT = 0.5
"""What every embedding has in its first column, so that a head can look somewhere whatever the token."""
FAST = 6
"""Rope's fastest pairs, which tell one place from the next."""
SLOW = 11
"""The first of rope's pairs that turn too little to matter over a short text; tokens are compared in these."""


GROUPS = 2
"""How many groups of the second layer's heads copy; the others, and all heads but one of the first, begin at random."""


@torch.no_grad()
def induce(model: Model, seed: int, sharpness: float = 3.5, copy: float = 3.0) -> None:
    """Writes the circuit into the first two layers.

    Args:
      model: with at least two layers.
      seed: of the directions.
      sharpness: of the norms of queries and keys, on each side.
      copy: how large a copied token is beside what stands in the residual stream.
    """
    shape = model.shape
    own, head, width = shape.near, shape.near.head_dim, shape.hidden_size
    model.embed_tokens.weight[:, 0] = CONSTANT
    for layer in model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    draw = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.zeros(width - 1, 1), _orthogonal(width - 1, draw)], 1)  # none along the constant
    known, told = rows[:head], rows[head : 2 * head]
    _look_back(model, known, told)

    attention = model.layers[1].self_attn
    slow = torch.arange(SLOW, head // 2)
    compared = torch.cat([slow, slow + head // 2])
    _sharpen(attention, compared, sharpness)
    heads = own.num_attention_heads // own.num_key_value_heads
    for group in range(min(GROUPS, own.num_key_value_heads)):
        mixed = _orthogonal(head, draw)[: len(compared)]
        keys = slice(group * head, (group + 1) * head)
        carried = rows[torch.arange((2 + group) * head, (3 + group) * head) % len(rows)]
        attention.k_proj.weight[keys] = 0
        attention.k_proj.weight[group * head + compared] = mixed @ told
        attention.v_proj.weight[keys] = carried
        for one in range(group * heads, (group + 1) * heads):
            queries = slice(one * head, (one + 1) * head)
            attention.q_proj.weight[queries] = 0
            attention.q_proj.weight[one * head + compared] = mixed @ known
            attention.o_proj.weight[:, queries] = carried.T * (copy / 8 / heads)


def _look_back(model: Model, known: Tensor, told: Tensor) -> None:
    """The first layer's first head looks at the token before and tells what it is."""
    head = model.shape.near.head_dim
    attention = model.layers[0].self_attn
    turn = model.shape.rope.theta ** -(torch.arange(0, head, 2) / head)[:FAST]
    query, key = torch.zeros(head), torch.zeros(head)
    query[:FAST] = 1
    key[:FAST], key[head // 2 : head // 2 + FAST] = turn.cos(), turn.sin()  # a query at the next place finds it
    fast = torch.arange(FAST)
    _sharpen(attention, torch.cat([fast, fast + head // 2]), 2.5)
    for weight, row in ((attention.q_proj.weight, query), (attention.k_proj.weight, key)):
        weight[:head] = 0
        weight[:head, 0] = row
    attention.v_proj.weight[:head] = known
    attention.o_proj.weight[:, :head] = told.T * 0.175


def _sharpen(attention: Attention, features: Tensor, sharpness: float) -> None:
    """Makes queries and keys sharp in these features, and has every head begin without them."""
    head = attention.head
    for norm, weight in ((attention.q_norm, attention.q_proj.weight), (attention.k_norm, attention.k_proj.weight)):
        norm.weight[features] = sharpness
        weight.view(-1, head, weight.shape[1])[:, features] = 0


def _orthogonal(size: int, draw: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=draw))[0]
