"""Where the launchers of all machines meet: a store on machine 0, which their ranks use as well.

It is what torchrun's static rendezvous is: `TCPStore` at an endpoint that all know, ranks numbered by `node_rank`. On
one machine the system picks a free port. Each launcher says every second that it lives, and the first to fail leaves
the reason here, so that the others end their ranks, too.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # public, but not marked so

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.engine.launch.failures import RankFailure
from opensora_cli.engine.launch.request import LaunchRequest

_CONNECT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_ANSWER_S = 5.0
_ANOTHER_PORT = "something else may listen there: choose another port on all machines"
_IDLE, _BUSY = "idle", "busy"
_END, _FINISHED, _LEFT = "osora/end", "osora/finished", "osora/left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The ranks of all machines, as one launcher knows them after all have come."""

    first_rank: int
    """Of this machine."""
    world_size: int
    host: str
    """Where the ranks of this machine find the store, with `port`."""
    port: int
    store: TCPStore
    node: int
    """This machine."""
    nnodes: int


def meet(request: LaunchRequest, *, wait_s: float) -> Meeting:
    """Wait until the launchers of all machines have come.

    Args:
        request: of this machine.
        wait_s: seconds to wait at most.

    Raises:
        RequestError: the endpoint's name is unknown, or the machines were asked for different things, as different
            numbers of ranks.
        HardwareError: not all came in time, or the endpoint cannot be reached.
    """
    deadline = time.monotonic() + wait_s
    store = _open_store(request, deadline)
    with _refusals(request):
        if store.add(f"osora/taken/{request.node_rank}", 1) > 1:
            raise RequestError(
                f"node_rank={request.node_rank} was taken by another machine",
                hint=f"give each machine its own --node-rank, 0 to {request.nnodes - 1}",
            )
        store.set(_alive(request.node_rank), "0")
        store.set(_idle(request.node_rank), _BUSY)
        mine = {"gpus": request.gpus, "nnodes": request.nnodes, "host": socket.gethostname()}
        store.set(f"osora/node/{request.node_rank}", json.dumps(mine))
        nodes = [json.loads(_when_there(store, request, node, deadline)) for node in range(request.nnodes)]
        _require_same(store, request.node_rank, nodes)
    return Meeting(
        first_rank=request.node_rank * request.gpus,
        world_size=request.nnodes * request.gpus,
        # Machine 0 keeps the store itself, whatever others call it.
        host="127.0.0.1" if request.node_rank == 0 else request.endpoint()[0],
        port=store.port,
        store=store,
        node=request.node_rank,
        nnodes=request.nnodes,
    )


def _require_same(store: TCPStore, node_rank: int, nodes: Sequence[Mapping[str, Any]]) -> None:
    here = nodes[node_rank]
    for name in ("nnodes", "gpus"):
        other = next((node for node in nodes if node[name] != here[name]), None)
        if other is not None:
            _leave(store, len(nodes), keeps_store=node_rank == 0, wait_s=_ANSWER_S / 2)
            raise RequestError(
                f"{name}={here[name]} here, and {other[name]} on {other['host']}",
                hint=f"say the same --{name} on all machines",
            )


class Neighbours:
    """Watches the other machines, and tells them how this one fares.

    All this happens in a thread of its own: who asks a store that is stopped waits for as long as it is. Without other
    machines there is neither.

    Args:
        meeting: of all machines.
        lost_s: seconds without a sign of life after which a machine counts as lost.
        interval_s: seconds between two looks.
    """

    def __init__(self, meeting: Meeting, *, lost_s: float, interval_s: float) -> None:
        self._store = meeting.store
        self._node = meeting.node
        self._nnodes = meeting.nnodes
        self._lost_s = lost_s
        self._interval_s = interval_s
        self._answered = time.monotonic()
        self._failure: RankFailure | None = None
        self._ours: RankFailure | None = None
        self._is_finished = False
        self._all_finished = meeting.nnodes == 1
        self._is_idle = self._all_idle = False
        self._look = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._watch, name="neighbours", daemon=True)

    def __len__(self) -> int:
        return self._nnodes - 1

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch inside the block. Machine 0, whose launcher keeps the store, leaves last."""
        if self._nnodes == 1:
            yield
            return
        self._thread.start()
        try:
            yield
        finally:
            self._stop = True
            self._look.set()
            self._thread.join(self._farewell_s() + _ANSWER_S / 5)

    def failure(self) -> RankFailure | None:
        """Return why the run ends, if another machine says so or is lost."""
        silent_s = time.monotonic() - self._answered
        if self._nnodes > 1 and self._failure is None and silent_s > self._lost_s:
            return _lost("machine 0, which keeps the store,", silent_s)
        return self._failure

    def tell(self, failure: RankFailure) -> None:
        """Leave the reason of the end for the other machines, unless one did so before."""
        self._ours = failure
        self._look.set()

    def all_finished(self) -> bool:
        """Say that the ranks of this machine are done, and return whether those of all machines are."""
        if not self._is_finished:
            self._is_finished = True
            self._look.set()
        return self._all_finished

    def all_idle(self, is_idle: bool) -> bool:
        """Say whether the ranks of this machine are idle, and return whether those of all machines are."""
        if is_idle != self._is_idle:
            self._is_idle = is_idle
            self._look.set()
        return is_idle and self._all_idle

    def _watch(self) -> None:
        beats = 0
        seen: dict[int, tuple[bytes, float]] = {}
        has_told_finish = False
        while not self._stop:
            # The machine whose rank is behind should be heard before those whose ranks only wait speak.
            self._look.wait(self._interval_s / 4 if self._is_idle else self._interval_s)
            self._look.clear()
            with suppress(DistError):
                if self._ours is not None:
                    self._store.compare_set(_END, "", _written(self._ours))
                if self._is_finished and not has_told_finish:
                    has_told_finish = True
                    self._store.add(_FINISHED, 1)
                beats += 1
                self._store.set(_alive(self._node), str(beats))
                self._store.set(_idle(self._node), _IDLE if self._is_idle else _BUSY)
                idle = self._store.multi_get([_idle(node) for node in range(self._nnodes)])
                self._all_idle = all(told.decode() == _IDLE for told in idle)
                self._failure = self._failure or self._ended() or self._find_lost(seen)
                self._all_finished = self._store.add(_FINISHED, 0) == self._nnodes
                self._answered = time.monotonic()
        _leave(self._store, self._nnodes, keeps_store=self._node == 0, wait_s=self._farewell_s())

    def _ended(self) -> RankFailure | None:
        return RankFailure(**json.loads(self._store.get(_END))) if self._store.check([_END]) else None

    def _find_lost(self, seen: dict[int, tuple[bytes, float]]) -> RankFailure | None:
        now = time.monotonic()
        for node, beat in enumerate(self._store.multi_get([_alive(node) for node in range(self._nnodes)])):
            if node not in seen or seen[node][0] != beat:
                seen[node] = beat, now
            elif now - seen[node][1] > self._lost_s:
                return _lost(f"machine {node}", now - seen[node][1])
        return None

    def _farewell_s(self) -> float:
        return _ANSWER_S if self._all_finished else _ANSWER_S / 2


def _leave(store: TCPStore, nnodes: int, *, keeps_store: bool, wait_s: float) -> None:
    """Say that this machine needs the store no more; who keeps it waits for the others."""
    deadline = time.monotonic() + wait_s
    with suppress(DistError):
        store.add(_LEFT, 1)
        while keeps_store and store.add(_LEFT, 0) < nnodes and time.monotonic() < deadline:
            time.sleep(_FIRST_PAUSE_S)


def _alive(node: int) -> str:
    return f"osora/alive/{node}"


def _idle(node: int) -> str:
    return f"osora/idle/{node}"


def _written(failure: RankFailure) -> str:
    return json.dumps({"message": failure.message, "hint": failure.hint, "exit_code": failure.exit_code})


def _lost(who: str, silent_s: float) -> RankFailure:
    return RankFailure(
        f"{who} has given no sign of life for {silent_s:.0f} s",
        hint="see whether its launcher runs and the network between them works",
        exit_code=HardwareError.exit_code,
    )


def _open_store(request: LaunchRequest, deadline: float) -> TCPStore:
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if request.rdzv_endpoint is None:
        return TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    host, port = request.endpoint()
    with _refusals(request):
        if request.node_rank == 0:
            _require_free(request, port)
            return TCPStore("127.0.0.1", port, is_master=True, timeout=timeout, wait_for_workers=False)
        _wait_for_listener(request, host, port, deadline)
        return _connected(request, host, port, deadline)


def _connected(request: LaunchRequest, host: str, port: int, deadline: float) -> TCPStore:
    """Connect from another thread: to something that takes connections and never answers, torch waits forever."""
    answers: SimpleQueue[TCPStore | Exception] = SimpleQueue()
    timeout = max(1.0, deadline - time.monotonic())

    def connect() -> None:
        try:
            answers.put(TCPStore(host, port, timeout=timedelta(seconds=timeout), wait_for_workers=False))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=connect, name="meeting", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout)
    except Empty:
        raise HardwareError(
            f"the machines cannot meet at {request.rdzv_endpoint}: what listens there does not answer",
            hint=_ANOTHER_PORT,
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


@contextmanager
def _refusals(request: LaunchRequest) -> Iterator[None]:
    try:
        yield
    except DistError as error:
        reason = " ".join(str(error).split())[:200]
        raise HardwareError(
            f"the machines cannot meet at {request.rdzv_endpoint}: {reason}",
            hint=_ANOTHER_PORT,
        ) from error


def _require_free(request: LaunchRequest, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise HardwareError(
                f"rdzv_endpoint={request.rdzv_endpoint}: cannot listen at port {port}: {error.strerror or error}",
                hint=_ANOTHER_PORT,
            ) from error


def _wait_for_listener(request: LaunchRequest, host: str, port: int, deadline: float) -> None:
    """Try again, ever more slowly: the first machine may start last."""
    pause = _FIRST_PAUSE_S
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            return
        except socket.gaierror as error:
            raise RequestError(f"rdzv_endpoint={request.rdzv_endpoint}: {error.strerror}") from error
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise HardwareError(
                    f"nobody listens at rdzv_endpoint={request.rdzv_endpoint}: {error.strerror or error}",
                    hint="start the machine with --node-rank 0 there, and let its firewall pass the port",
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _when_there(store: TCPStore, request: LaunchRequest, node: int, deadline: float) -> bytes:
    key = f"osora/node/{node}"
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise HardwareError(
                f"machine {node} of {request.nnodes} did not come to {request.rdzv_endpoint}",
                hint=f"start it with --node-rank {node} and the same --rdzv-endpoint",
            )
        time.sleep(_FIRST_PAUSE_S)
    return bytes(store.get(key))
