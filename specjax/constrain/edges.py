"""The steps of a table between its states, with what each state of a hidden Markov model writes there.

In shapes `S` denotes states, `H` hidden states, `E` pairs of a state and a next state, `U` tokens of the language.
"""

import dataclasses

import numpy as np

from specjax.constrain.hmm import Hmm
from specjax.constrain.table import NONE, Table


@dataclasses.dataclass(frozen=True)
class Edges:
    """What the probability of a completed text is computed from.

    Attributes:
      begin: `[E]` int32, the state before.
      end: `[E]` int32, the state after.
      weight: `[E, H]` float32, the probability that a hidden state writes a token that leads there.
      tokens: `[U]` int32, the tokens that some text of the language has.
      emission: `[H, U]` float32, of these tokens.
    """

    begin: np.ndarray
    end: np.ndarray
    weight: np.ndarray
    tokens: np.ndarray
    emission: np.ndarray


def edges_of(table: Table, hmm: Hmm) -> Edges:
    """The steps of a table. From the last state, where a text has ended, there are none."""
    from scipy.sparse import csr_array  # jax brings scipy, which is slow to import

    kinds, states = table.following.shape[1], len(table)
    begin, kind = np.nonzero(table.following[:-1] != NONE)
    pairs, at = np.unique(begin.astype(np.int64) * states + table.following[begin, kind], return_inverse=True)
    tokens = np.arange(len(table.classes))
    ones = lambda rows, columns, shape: csr_array((np.ones(len(rows), np.float32), (rows, columns)), shape)
    written = ones(table.classes, tokens, (kinds, len(tokens))) @ hmm.emission.T
    weight = ones(at.reshape(-1), kind, (len(pairs), kinds)) @ written
    used = np.flatnonzero(np.isin(table.classes, kind))
    return Edges(
        (pairs // states).astype(np.int32),
        (pairs % states).astype(np.int32),
        np.asarray(weight, np.float32),
        used.astype(np.int32),
        np.ascontiguousarray(hmm.emission[:, used]),
    )
