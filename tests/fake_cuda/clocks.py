"""Which of what was asked is done before what: vector clocks of threads, streams and collectives."""

from collections.abc import Mapping

from fake_cuda.log import Awaited, Collective, Copy, Entry, Marked, Operation, Synchronized

Clock = dict[str, int]
"""Of each queue or thread, how much is known to be done."""


class Clocks:
    """The clocks of one log, whose entries are given to `pass_` in their order."""

    def __init__(self) -> None:
        self._of: dict[str, Clock] = {}
        self._marks: dict[object, Clock] = {}

    def of(self, agent: str) -> Clock:
        """Return what is done before what an agent does next; an agent is a thread or a queue."""
        return self._of.setdefault(agent, {agent: 0})

    def pass_(self, entry: Entry) -> None:
        thread = self.of(entry.thread)
        match entry:
            case Collective():
                assert entry.queue is not None
                # It begins when what was queued before is done.
                self._step(entry.queue, thread, thread if entry.caller is None else self.of(entry.caller))
                self._marks[entry.work] = dict(self.of(entry.queue))
            case Operation():
                agent = entry.queue or entry.thread
                self._step(agent, thread)
                if isinstance(entry, Copy) and entry.is_blocking:
                    _join(thread, self.of(agent))
            case Marked():
                thread[entry.thread] += 1
                _join(self.of(entry.agent), thread)
                self._marks[entry.mark] = dict(self.of(entry.agent))
            case Awaited():
                _join(self.of(entry.agent), self._marks.get(entry.mark, {}))
            case Synchronized():
                _join(thread, self._marks.get(entry.mark, {}))
                for queue in entry.queues:
                    _join(thread, self.of(queue))

    def _step(self, agent: str, *before: Clock) -> None:
        own = self.of(agent)
        for clock in before:
            _join(own, clock)
        own[agent] += 1


def _join(into: Clock, other: Mapping[str, int]) -> None:
    for agent, tick in other.items():
        if tick > into.get(agent, -1):
            into[agent] = tick
