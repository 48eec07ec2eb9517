"""Which of what was asked is done before what: vector clocks of threads, streams and collectives."""

from collections.abc import Mapping

from fake_cuda.log import (
    Collective,
    Copy,
    Entry,
    EventRecorded,
    EventWaited,
    Operation,
    Synchronized,
    TaskAwaited,
    TaskDone,
    ThreadStarted,
    WorkWaited,
)

Clock = dict[str, int]
"""Of each queue or thread, how much is known to be done."""


class Clocks:
    """The clocks of one log, whose entries are given to `pass_` in their order."""

    def __init__(self) -> None:
        self._of: dict[str, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._tasks: dict[int, Clock] = {}
        self._works: dict[int, Clock] = {}

    def of(self, agent: str) -> Clock:
        """Return what is done before what an agent does next; an agent is a thread or a queue."""
        return self._of.setdefault(agent, {agent: 0})

    def pass_(self, entry: Entry) -> None:
        """Go on behind an entry."""
        thread = self.of(entry.thread)
        match entry:
            case Collective():
                assert entry.queue is not None
                # It begins when what was queued before is done.
                self._step(entry.queue, thread, thread if entry.caller is None else self.of(entry.caller))
                self._works[entry.work] = dict(self.of(entry.queue))
            case Operation():
                agent = entry.queue or entry.thread
                self._step(agent, thread)
                if isinstance(entry, Copy) and entry.is_blocking:
                    _join(thread, self.of(agent))
            case WorkWaited():
                _join(self.of(entry.queue or entry.thread), self._works.get(entry.work, {}))
            case EventRecorded():
                _join(self.of(entry.queue), thread)
                self._events[entry.event] = dict(self.of(entry.queue))
            case EventWaited():
                _join(self.of(entry.queue), self._events.get(entry.event, {}))
            case Synchronized():
                if entry.event is not None:
                    _join(thread, self._events.get(entry.event, {}))
                for queue in entry.queues:
                    _join(thread, self.of(queue))
            case ThreadStarted():
                thread[entry.thread] += 1
                _join(self.of(entry.other), thread)
            case TaskDone():
                thread[entry.thread] += 1
                self._tasks[entry.task] = dict(thread)
            case TaskAwaited():
                _join(thread, self._tasks.get(entry.task, {}))

    def _step(self, agent: str, *before: Clock) -> None:
        own = self.of(agent)
        for clock in before:
            _join(own, clock)
        own[agent] += 1


def _join(into: Clock, other: Mapping[str, int]) -> None:
    for agent, tick in other.items():
        if tick > into.get(agent, -1):
            into[agent] = tick
