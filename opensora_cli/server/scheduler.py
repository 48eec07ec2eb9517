"""Scheduler of a server: gives the jobs of one queue to its workers, and tells listeners what happens."""

import asyncio
import json
import logging
import os
import re
import shutil
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.server.jobs import Job, JobStore, NoJob, Status

_MOST_DEATHS = 3
"""Workers that die during one job before it fails."""
_MOST_EVENTS = 200
"""Events that a slow listener may miss before it is dropped."""
_PING_S = 15.0
_ROOM, _RESERVE = 32 * 2**20, 2**20
"""Free bytes of the disk that a job needs to begin, and bytes that are kept for the records of jobs."""
_PLAN_S = 120.0
_NO_PLAN = {"error": {"message": "the planner did not answer", "hint": "try again", "exit_code": 4}}
_DELETED = ".deleted"
_JOB_ID = re.compile(r"video_[0-9a-f]{24}")
_RETRY_S = 1.0
"""Seconds until a worker that ended starts again, and until a write to a full disk is tried again."""
_LONGEST_LINE = 16 * 2**20
_STOP_S = 120.0
"""Seconds that a process may take to finish its step and to save its state."""

_T = TypeVar("_T")
_Report = Mapping[str, Any]


class Process:
    """A process of `server.worker`, which ends with the server: commands and reports are JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *words: str) -> "Process":
        """Start a process for `words`: `videos`, perhaps with the number of a device, or `plans`."""
        return cls(
            await asyncio.create_subprocess_exec(
                *module_command("opensora_cli.server.worker"),
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=safe_environment(os.environ),
                limit=_LONGEST_LINE,
                # Ctrl-C in a terminal reaches the server alone, which then stops the worker.
                start_new_session=True,
            )
        )

    async def send(self, **command: Any) -> None:
        """Send a command. A process that has ended ignores it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            await self._process.stdin.drain()

    async def reports(self) -> AsyncIterator[_Report]:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield json.loads(line)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ended(self) -> int:
        """Wait for the end of the process, and return its exit code; that of a signal is negative."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Let the process finish its step, save its state and end; kill it if that takes too long."""
        await self.send(do="stop")
        try:
            await asyncio.wait_for(self.ended(), _STOP_S)
        except TimeoutError:
            self.kill()
            await self.ended()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()


class Scheduler:
    """The queue of a server and its workers.

    Args:
        store: jobs.
        folder: folder with a folder for each job.
        groups: number of workers, each with a device of its own.
        save_every: seconds of work between two saves of a running job's state.
    """

    def __init__(self, store: JobStore, folder: Path, *, groups: int, save_every: float) -> None:
        self._store, self._folder, self._groups, self._save_every = store, folder, groups, save_every
        self._reserve = folder / "reserve"
        self._is_stopping = False
        self._wakes, self._news, self._planning = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._workers: set[Process] = set()
        self._planner: Process | None = None
        self._running: dict[str, Process] = {}
        """Worker of each running job."""
        self._events: deque[_Report] = deque(maxlen=_MOST_EVENTS)
        self.event_count = 0
        """Events since the start."""
        self.problem: str | None = None
        """Reason why no more videos are made: a bug, whose traceback is in the log."""
        self.progress: dict[str, _Report] = {}
        """Last progress of each running job: stage, done, total, unit, eta_s, percent."""
        self.seconds: dict[str, float] = {}
        """Seconds of work by stage since the start."""

    def job_folder(self, job_id: str) -> Path:
        return self._folder / "jobs" / job_id

    def is_disk_full(self) -> bool:
        """Return whether the disk has no room for another video: queued jobs wait then."""
        return shutil.disk_usage(self._folder).free < _ROOM

    async def run(self) -> None:
        """Make all queued jobs until the task is cancelled. Jobs of a server that died continue."""
        try:
            with suppress(OSError, sqlite3.OperationalError):  # the next start sweeps again
                self._sweep()
            self._keep_reserve()
            for job_id in reversed(self._store.ids(Status.IN_PROGRESS)):  # each becomes the first
                await self._settle(job_id)
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._groups):
                    tasks.create_task(self._work(number))
        except Exception as error:
            logging.getLogger("uvicorn.error").exception("no more videos are made")
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            self.problem = f"no more videos are made: {type(error).__name__}"

    def _sweep(self) -> None:
        """Remove what a killed server left: deleted jobs, and uploads that became no job. Other files stay."""
        known = {job_id for status in Status for job_id in self._store.ids(status)}
        for folder in self._folder.glob("jobs/video_*"):
            if not _JOB_ID.fullmatch(folder.stem) or folder.is_symlink() or not folder.is_dir():
                continue
            names = [path.name for path in folder.iterdir()]
            if folder.suffix == _DELETED:
                self._store.delete(folder.stem)
            elif folder.suffix or folder.stem in known or not all(name.startswith("reference_") for name in names):
                continue
            shutil.rmtree(folder, ignore_errors=True)

    async def _work(self, number: int) -> None:
        """Give jobs to the worker of a group, and start it again when it ends."""
        while not self._is_stopping:
            try:
                worker = await Process.start("videos", *([str(number)] if self._groups > 1 else []))
            except OSError:  # no memory for another process
                await asyncio.sleep(_RETRY_S)
                continue
            self._workers.add(worker)
            try:
                while not self._is_stopping and not worker.has_ended:
                    await self._make_next(worker)
            finally:
                self._workers.discard(worker)
            await asyncio.sleep(_RETRY_S)

    async def _make_next(self, worker: Process) -> None:
        """Make the next job if there is one, or wait for news of the queue or the disk."""
        self._wakes.clear()
        if self.is_disk_full():
            await asyncio.sleep(_RETRY_S)
        elif (job := await self._written(self._store.take)) is None:
            await self._wakes.wait()
        else:
            await self._make(job, worker)

    async def _make(self, job: Job, worker: Process) -> None:
        self._running[job.id] = worker
        self.publish({"event": "job", "id": job.id})
        self.publish({"event": "queue"})
        command = {"id": job.id, "settings": job.settings, "folder": str(self.job_folder(job.id))}
        await worker.send(do="make", save_every=self._save_every, **command)
        async for report in worker.reports():
            if report["id"] != job.id:
                continue  # a group of ranks ended after its video
            match report["event"]:
                case "completed":
                    for stage, seconds in report["timings_s"].items():
                        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
                    return await self._settle(job.id, Status.COMPLETED)
                case "failed":
                    return await self._settle(job.id, Status.FAILED, report["error"])
                case "stopped":
                    return await self._settle(job.id)
                case "progress":
                    self.progress[job.id] = report["progress"]
            self.publish(report)
        code, has_died = await worker.ended(), not self._is_stopping
        if job.deaths + has_died < _MOST_DEATHS or self._store.get(job.id).is_cancelled:
            return await self._settle(job.id, has_died=has_died)
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        error = {
            "code": "worker_died",
            "message": f"{_MOST_DEATHS} workers died while they made this video, the last with {ended}",
            "hint": "ask for fewer frames or a smaller size: memory is the usual reason",
            "exit_code": 4,
        }
        await self._settle(job.id, Status.FAILED, error)

    async def _settle(
        self, job_id: str, status: Status | None = None, error: _Report | None = None, *, has_died: bool = False
    ) -> None:
        """Record the end of a running job. None puts it back at the head of the queue, unless a client cancelled it."""
        if status is None and self._store.get(job_id).is_cancelled:
            status = Status.CANCELLED
        if status is not None:
            await self._written(partial(self._end, job_id, status, error))
        else:
            await self._written(partial(self._store.requeue, job_id, has_died=has_died))
            self.publish({"event": "job", "id": job_id})
        self._running.pop(job_id, None)
        self.progress.pop(job_id, None)
        self._keep_reserve()
        self.wake()

    async def _written(self, write: Callable[[], _T]) -> _T | None:
        """Call a function that writes to the store until the disk has room for it, or until the server stops.

        The next server finds the job in progress, then.
        """
        while True:
            try:
                return write()
            except sqlite3.OperationalError:
                if self._is_stopping:
                    return None
                self._reserve.unlink(missing_ok=True)
                await asyncio.sleep(_RETRY_S)

    def _keep_reserve(self) -> None:
        """Keep room on the disk for the record that a job failed because the disk is full."""
        if not self._reserve.exists():
            try:
                self._reserve.write_bytes(bytes(_RESERVE))
            except OSError:
                self._reserve.unlink(missing_ok=True)

    def _end(self, job_id: str, status: Status, error: _Report | None = None) -> Job:
        job = self._store.finish(job_id, status, error=error)
        self.publish({"event": "job", "id": job_id})
        if status is Status.CANCELLED:
            for file in self.job_folder(job_id).glob("video*"):
                file.unlink(missing_ok=True)
        return job

    def wake(self) -> None:
        self._wakes.set()
        self.publish({"event": "queue"})

    async def cancel(self, job_id: str) -> Job:
        """End a job; a running one ends within a step, and is `in_progress` until then.

        Raises NoJob if there is no such job, and RequestError if it is over.
        """
        job = self._store.get(job_id)
        if job.status.is_over:
            raise RequestError(f"{job_id} is {job.status} already, and cannot be cancelled")
        if job.status is Status.QUEUED:
            return self._end(job_id, Status.CANCELLED)
        await self._written(partial(self._store.change, job_id, is_cancelled=True))
        if job_id in self._running:
            await self._running[job_id].send(do="cancel", id=job_id)
        return job

    async def delete(self, job_id: str) -> None:
        """Forget a job, and remove its files. Raises NoJob if there is none."""
        if not self._store.get(job_id).status.is_over:
            await self.cancel(job_id)
            with suppress(NoJob):  # another client deleted it, too
                while not self._store.get(job_id).status.is_over:
                    await asyncio.sleep(0.05)
        # A killed server leaves a folder whose name says that its job was deleted.
        deleted = self.job_folder(job_id).with_suffix(_DELETED)
        with suppress(FileNotFoundError):
            self.job_folder(job_id).rename(deleted)
        self._store.delete(job_id)
        await asyncio.to_thread(shutil.rmtree, deleted, ignore_errors=True)
        self.publish({"event": "deleted", "id": job_id})

    async def plan(self, settings: _Report) -> _Report:
        """Return the report of the planner, which makes one plan after the other; it may have an `error`."""
        report: _Report | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_PLAN_S), self._planning:
                if self._planner is None:
                    self._planner = await Process.start("plans")
                try:
                    await self._planner.send(do="plan", settings=settings)
                    report = await anext(self._planner.reports(), None)
                finally:
                    if report is None:  # a late report would be that of the next plan
                        self._planner.kill()
                        self._planner = None
        return report or _NO_PLAN

    async def stop(self) -> None:
        """Save the running jobs, and end the processes."""
        self._is_stopping = True
        self._wakes.set()
        processes = [*self._workers, *filter(None, [self._planner])]
        await asyncio.gather(*(process.stop() for process in processes))
        self._news.set()

    def publish(self, event: _Report) -> None:
        self._events.append(event)
        self.event_count += 1
        self._news.set()
        self._news = asyncio.Event()

    async def events(self, since: int, *first: _Report) -> AsyncIterator[_Report | None]:
        """Yield `first`, the events after the first `since`, and None after each pause, until the server stops.

        The events of a listener that does not read end, too: it reconnects.
        """
        for event in first:
            yield event
        while not self._is_stopping and self.event_count - since <= len(self._events):
            if since < self.event_count:
                since += 1
                yield self._events[since - self.event_count - 1]
                continue
            try:
                await asyncio.wait_for(self._news.wait(), _PING_S)
            except TimeoutError:
                yield None
