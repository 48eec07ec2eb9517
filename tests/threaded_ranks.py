"""Ranks that are threads of this process: many of them, whose collectives really move data, at little cost.

One runs at a time, and others go on where it has to wait for them: what happens is the same in every run.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, ret_work

_SECONDS = 240.0
_BACKEND = "threads_for_gloo"  # the engine sends the host's messages by groups that have gloo


def run_in_threads(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank and return what each returned; a failure on any rank is raised here."""
    answers, failures = [None] * ranks, list[BaseException]()
    turn, store = _Turn(), dist.HashStore()

    def run(rank: int) -> None:
        with turn.lock:
            _here.turn = turn
            try:
                dist.init_process_group(_BACKEND, rank=rank, world_size=ranks, store=store)
                answers[rank] = function(*args)
            except BaseException as error:
                failures.append(error)
                turn.give_up()
            finally:
                dist.destroy_process_group()

    dist.Backend.register_backend(_BACKEND, lambda store, rank, size, timeout: _Group(rank, size), devices=["cpu"])
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        with patch.object(multi_threaded_pg, "Collective", _Collective):
            threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        ProcessLocalGroup.reset()
    if failures:
        raise failures[0]
    return answers


class _Sent:
    """What one rank has sent another, and that has not received yet."""

    def __init__(self, lock: threading.Lock) -> None:
        self.tensors = deque[Tensor]()
        self.condition = threading.Condition(lock)


class _Turn:
    """Whose turn it is: of the thread that holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sent = defaultdict[tuple[str, int, int], _Sent](lambda: _Sent(self.lock))
        """By group, sender and receiver."""
        self._waited_for = list[threading.Condition]()
        self._gave_up = False

    def wait_for(self, condition: threading.Condition, there: Callable[[], bool]) -> None:
        """Let the other ranks run until `there`, and one of them has notified the condition."""
        self._waited_for.append(condition)
        came = condition.wait_for(lambda: there() or self._gave_up, timeout=_SECONDS)
        self._waited_for.remove(condition)
        if self._gave_up or not came:
            raise RuntimeError("another rank failed, or did not come to the same collective")

    def give_up(self) -> None:
        """Let all fail that wait."""
        self._gave_up = True
        for condition in self._waited_for:
            condition.notify_all()


_here = threading.local()
"""Whose `turn` is that of the run which a thread is a rank of."""


class _Collective:
    """One collective of a group, which the last rank to come carries out for all."""

    def __init__(self, ranks: int, collective: Any, group: object) -> None:
        self._collective = collective
        self._given = list[Any]([None] * ranks)
        self._missing = ranks
        self._done = threading.Condition(_here.turn.lock)

    def join(self, rank: int, data: Any) -> Any:
        self._given[rank] = data
        self._missing -= 1
        if self._missing:
            _here.turn.wait_for(self._done, lambda: self._missing == 0)
        else:
            self._collective.work(self._given)
            self._done.notify_all()
        return ret_work(data)


class _Group(ProcessLocalGroup):  # type: ignore[misc]
    """Torch's group of threads, and what it lacks: transfers from rank to rank."""

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> Any:
        sent = _here.turn.sent[self.pg_name, self.rank(), receiver]
        sent.tensors.extend(tensor.clone() for tensor in tensors)
        sent.condition.notify()
        return ret_work(tensors)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Any:
        return _Received(tensors[0], _here.turn.sent[self.pg_name, sender, self.rank()])


class _Received(dist.Work):
    """A tensor that is there when it has been waited for."""

    def __init__(self, tensor: Tensor, sent: _Sent) -> None:
        super().__init__()
        self._tensor, self._sent = tensor, sent

    def wait(self, timeout: object = None) -> bool:
        _here.turn.wait_for(self._sent.condition, lambda: bool(self._sent.tensors))
        self._tensor.copy_(self._sent.tensors.popleft())
        return True
