"""Scheduler of a server: gives jobs to the worker, one after the other, and tells listeners what happens."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.server.jobs import Job, JobStore, Status
from opensora_cli.server.processes import Process

_MOST_ATTEMPTS = 3
"""Workers that may die during one job before it fails."""
_MOST_WAITING = 200
"""Events that wait for a slow listener before it is dropped."""
_PLAN_S = 120.0
_RESTART_S = 1.0


class PlanFailed(OsoraError):
    """A plan failed for a reason that the planner gives."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(error["message"], hint=error["hint"])
        self.code, self.exit_code = error["code"], error["exit_code"]


class Scheduler:
    """The queue of a server and its worker.

    Args:
        store: jobs.
        folder: folder with a folder for each job.
    """

    def __init__(self, store: JobStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._wakes = asyncio.Event()
        self._listeners: set[asyncio.Queue[Mapping[str, Any] | None]] = set()
        self._worker: Process | None = None
        self._planner: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._plans: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._numbers = itertools.count()
        self._running: str | None = None
        self._is_stopping = False
        self.seconds: dict[str, float] = {}
        """Seconds of work by stage since the start."""

    def job_folder(self, job_id: str) -> Path:
        """Return the folder of a job."""
        return self._folder / "jobs" / job_id

    async def run(self) -> None:
        """Make all queued jobs until the task is cancelled. Jobs of a server that died continue."""
        for job_id in self._store.ids(Status.IN_PROGRESS):
            self._store.requeue(job_id)
        while not self._is_stopping:
            self._worker = await Process.start("videos")
            await self._serve(self._worker)
            if not self._is_stopping:
                await asyncio.sleep(_RESTART_S)

    async def stop(self) -> None:
        """Save the running job, and end the processes."""
        self._is_stopping = True
        self._wakes.set()
        for process in filter(None, (self._worker, self._planner)):
            await process.stop()
        for listener in self._listeners:
            with suppress(asyncio.QueueFull):
                listener.put_nowait(None)

    def wake(self) -> None:
        """Look at the queue, which has changed."""
        self._wakes.set()
        self.publish({"event": "queue", "queue": self._store.ids(Status.QUEUED)})

    async def cancel(self, job_id: str) -> Job:
        """End a job; a running one ends within a step, and is `in_progress` until then.

        Raises KeyError if there is no such job, and RequestError if it is over.
        """
        job = self._store.get(job_id)
        if job.status.is_over:
            raise RequestError(f"{job_id} is {job.status} already, and cannot be cancelled")
        if job_id == self._running and self._worker is not None:
            await self._worker.send(do="cancel", id=job_id)
            return job
        return self._end(job_id, Status.CANCELLED)

    async def delete(self, job_id: str) -> None:
        """Forget a job, and remove its files. Raises KeyError if there is none."""
        if not self._store.get(job_id).status.is_over:
            await self.cancel(job_id)
            while not self._store.get(job_id).status.is_over:
                await asyncio.sleep(0.05)
        self._store.delete(job_id)
        await asyncio.to_thread(shutil.rmtree, self.job_folder(job_id), ignore_errors=True)
        self.publish({"event": "deleted", "id": job_id})

    async def plan(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the report of the planner. Raises PlanFailed."""
        if self._planner is None:
            self._planner = await Process.start("plans")
            # The event loop alone would not keep the task.
            self._reading = asyncio.create_task(self._read_plans(self._planner))
        number = next(self._numbers)
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._plans[number] = answer
        try:
            await self._planner.send(do="plan", id=number, settings=settings)
            report = await asyncio.wait_for(answer, _PLAN_S)
        finally:
            self._plans.pop(number, None)
        if report["event"] == "failed":
            raise PlanFailed(report["error"])
        return report

    def publish(self, event: Mapping[str, Any]) -> None:
        """Send an event to all listeners. One that does not read is dropped, and reconnects."""
        for listener in list(self._listeners):
            try:
                listener.put_nowait(event)
            except asyncio.QueueFull:
                self._listeners.discard(listener)
                listener.get_nowait()
                listener.put_nowait(None)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[asyncio.Queue[Mapping[str, Any] | None]]:
        """Yield a queue of events; None is the end."""
        queue: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue(_MOST_WAITING)
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)

    async def _serve(self, worker: Process) -> None:
        """Give jobs to a worker until it ends."""
        feeding = asyncio.create_task(self._feed(worker))
        try:
            async for report in worker.reports():
                await self._hear(report)
            code = await worker.ended()
        finally:
            feeding.cancel()
        if self._running is not None:
            self._worker_died(self._running, code)
            self._running = None

    async def _feed(self, worker: Process) -> None:
        while not self._is_stopping:
            self._wakes.clear()
            queue = self._store.ids(Status.QUEUED)
            if self._running is None and queue:
                self._running = queue[0]
                job = self._store.begin(self._running)
                self.publish({"event": "job", "id": job.id, "status": job.status})
                folder = self.job_folder(job.id)
                await worker.send(do="make", id=job.id, settings=job.settings, folder=str(folder))
            await self._wakes.wait()

    async def _hear(self, report: Mapping[str, Any]) -> None:
        job_id = report.get("id")
        match report["event"]:
            case "progress":
                self._store.report(report["id"], report["progress"])
                self.publish(report)
            case "completed":
                for stage, seconds in report["result"]["timings_s"].items():
                    self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
                self._end(report["id"], Status.COMPLETED)
            case "failed":
                self._end(report["id"], Status.FAILED, report["error"])
            case "stopped" if report["is_cancelled"]:
                self._end(report["id"], Status.CANCELLED)
            case "stopped":
                self._store.requeue(report["id"])
            case _:
                self.publish(report)
        if report["event"] in ("completed", "failed", "stopped") and job_id == self._running:
            self._running = None
            self._wakes.set()

    def _end(self, job_id: str, status: Status, error: Mapping[str, Any] | None = None) -> Job:
        job = self._store.finish(job_id, status, error=error)
        self.publish({"event": "job", "id": job_id, "status": status, "error": error})
        if status is Status.CANCELLED:
            for file in self.job_folder(job_id).glob("video*"):
                file.unlink(missing_ok=True)
        return job

    def _worker_died(self, job_id: str, code: int) -> None:
        job = self._store.get(job_id)
        if self._is_stopping or job.attempts < _MOST_ATTEMPTS:
            self._store.requeue(job_id)
            self.publish({"event": "job", "id": job_id, "status": Status.QUEUED})
            return
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._end(
            job_id,
            Status.FAILED,
            {
                "code": "worker_died",
                "message": f"{_MOST_ATTEMPTS} workers died while they made this video, the last with {ended}",
                "hint": "ask for fewer frames or a smaller size: memory is the usual reason",
                "exit_code": 4,
            },
        )

    async def _read_plans(self, planner: Process) -> None:
        async for report in planner.reports():
            answer = self._plans.get(report.get("id", -1))
            if answer is not None and not answer.done():
                answer.set_result(report)
        self._planner = None
        for answer in self._plans.values():
            if not answer.done():
                answer.set_result(
                    {
                        "event": "failed",
                        "error": {
                            "code": "planner_died",
                            "message": "the planner ended",
                            "hint": "try again",
                            "exit_code": 4,
                        },
                    }
                )
