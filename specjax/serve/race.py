"""Selection of the shortest completion: once one has ended, the others of its prompt stop at its length."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specjax.sampling_params import in_use
from specjax.serve.request import Record, Request, rows_of
from specjax.sharding.distributed import to_devices, to_host
from specjax.state import Finish
from specjax.warpers import WARPERS

ENDED = ("eos", "stop")
"""The reasons for which a text ends by itself."""


class Race:
    """Knows the shortest finished completion of every prompt.

    Args:
      requests: completions of a prompt are adjacent.
    """

    def __init__(self, requests: Sequence[Request]):
        groups = rows_of(requests, len(requests) + 1)
        self.group_of = {index: group for group, indices in enumerate(groups) for index in indices}
        self.shortest: dict[int, int] = {}
        reading = [each for each in WARPERS if each.reads_limit]
        self.reads_limit = {i for i, one in enumerate(requests) if any(in_use(each, one) for each in reading)}

    def hear(self, finished: Iterable[tuple[int, Record]]) -> None:
        """Notes finished records, by their requests' indices."""
        for index, record in finished:
            if record.finish_reason in ENDED:
                group = self.group_of[index]
                self.shortest[group] = min(self.shortest.get(group, record.new_tokens), record.new_tokens)

    def bound(self, state: Any, held: Mapping[int, Sequence[int]]) -> tuple[Any, list[int]]:
        """The state with lower length limits, and the rows that have reached theirs; these are done now.

        Rows keep their limits if what they write depends on these; they are only done as early.

        Args:
          state: the rows' state.
          held: the indices of every running row's requests.
        """
        most = {
            row: self.shortest[group] for row, own in held.items() if (group := self.group_of[own[0]]) in self.shortest
        }
        if not most:
            return state, []
        host = to_host({name: getattr(state, name) for name in ("limit", "length", "prompt_length", "finish")})
        limit, finish, over = host["limit"].copy(), host["finish"].copy(), []
        for row, count in most.items():
            end = min(limit[row], host["prompt_length"][row] + count)
            limit[row] = limit[row] if held[row][0] in self.reads_limit else end
            if host["length"][row] >= end and finish[row] == Finish.RUNNING:
                over.append(row)
        finish[over] = Finish.LENGTH
        limit, finish = to_devices(limit, state.limit.sharding), to_devices(finish, state.finish.sharding)
        return dataclasses.replace(state, limit=limit, finish=finish), over
