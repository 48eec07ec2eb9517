"""Ranks that exchange short notes by the store, without a collective: who is there, and what each is about to do."""

import json
from datetime import timedelta

import torch.distributed as dist

from opensora_cli.core.exceptions import HardwareError

_VERDICT, _COMPLETE, _GONE = "verdict", "complete", "gone"
_GROUPS = "groups"


class AbsentRanks(HardwareError):
    """Some ranks did not come in time; `ranks` are their numbers in the group."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"ranks {ranks} did not come in time", hint="see what became of them")
        self.ranks = ranks


class Meeting:
    """Meetings of all ranks of a group, one after the other.

    A meeting that failed leaves the group as it was, for nothing was sent in it. All ranks must make theirs for a
    group in the same order.

    Args:
        group: the ranks.
        purpose: a name for meetings of this sort, the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, purpose: str) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._store = group.get_group_store()
        # Notes of those who made theirs before must not be taken for ours.
        self._prefix = f"{purpose}/{self._store.add(f'{purpose}/made/{self._rank}', 1)}"
        self._held = 0

    def exchange(self, note: str, *, timeout_s: float) -> list[str]:
        """Return the notes of all ranks, in their order.

        Raises:
            AbsentRanks: these did not come within `timeout_s`, or have already given up waiting for others.
        """
        self._held += 1
        place = f"{self._prefix}/{self._held}"
        keys = [f"{place}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(note))
        absent: list[int] = []
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        # One who comes late must not go on alone: who is done first decides for all.
        ours = f"{_GONE} {self._rank}" if absent else _COMPLETE
        verdict = self._store.compare_set(f"{place}/{_VERDICT}", "", ours).decode()
        if verdict != _COMPLETE:
            raise AbsentRanks(absent or [int(verdict.removeprefix(_GONE))])
        if self._held > 1:
            self._forget(f"{self._prefix}/{self._held - 1}")
        return [json.loads(self._store.get(key)) for key in keys]

    def _forget(self, place: str) -> None:
        # Whoever has come to the next has read what there was before.
        self._store.delete_key(f"{place}/{self._rank}")
        if self._rank == 0:
            self._store.delete_key(f"{place}/{_VERDICT}")


def group_with(ranks: list[int], *, timeout_s: float = 600.0) -> dist.ProcessGroup:
    """Make a group of `ranks`; every rank of the run calls it at the same time, naming those with whom it wants one.

    `dist.new_group` wants to be called on all ranks for every group, those of others too, in the same order; here each
    need only know its own. It works although groups that were made before are broken, the world's too.

    Args:
        ranks: of the world, with this one; all of them name the same, in the same order.
        timeout_s: for all to come.

    Raises:
        AbsentRanks: these did not come.
    """
    world = dist.group.WORLD
    assert world is not None
    notes = Meeting(world, _GROUPS).exchange(json.dumps(ranks), timeout_s=timeout_s)
    own: dist.ProcessGroup | None = None
    for wanted in sorted({tuple(json.loads(note)) for note in notes}):
        group = dist.new_group(list(wanted), sort_ranks=False)
        if list(wanted) == ranks:
            own = group
    assert own is not None
    return own
