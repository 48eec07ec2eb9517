"""Jobs of a server in one SQLite file: they outlive the server, its worker and the machine."""

import json
import secrets
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import CheckpointError, RequestError

SCHEMA_VERSION = 4
_CREATE = f"""
BEGIN IMMEDIATE;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, place REAL NOT NULL, status TEXT NOT NULL, rest TEXT NOT NULL
);
CREATE INDEX jobs_by_status ON jobs (status, place);
PRAGMA user_version={SCHEMA_VERSION};
COMMIT;
"""
_COLUMNS = ("number", "id", "place", "status")
"""Fields of a job that are columns; `rest` has the others as JSON."""


class Status(StrEnum):
    """State of a job, with the words of the OpenAI API and `cancelled`."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self not in (Status.QUEUED, Status.IN_PROGRESS)


class NoJob(KeyError):
    """There is no job with an ID."""


class QueueFull(RequestError):
    """The queue is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One video to make, or made."""

    id: str
    number: int
    """Order of creation, which does not depend on the clock."""
    place: float
    """Order in the queue; the lowest place is next."""
    status: Status
    created_at: int
    """Seconds since 1970, like `started_at` and `completed_at`."""
    request: Mapping[str, Any]
    """Fields that answers repeat, such as model, prompt, seconds and size."""
    settings: Mapping[str, Any]
    """Settings as `GenerateSettings.model_dump(mode="json")` writes them."""
    started_at: int | None = None
    completed_at: int | None = None
    error: Mapping[str, Any] | None = None
    """Code, message, hint and exit code of a failure."""
    deaths: int = 0
    """Workers that died during the job."""
    remixed_from: str | None = None
    is_cancelled: bool = False
    """Whether a client cancelled the job while it ran: it ends at its next step, also if the server dies before."""


class JobStore:
    """Jobs in the file `jobs.sqlite`, for one thread. A change is one transaction.

    Raises CheckpointError if the file is broken or was written by another version.
    """

    def __init__(self, path: Path, *, max_queue: int) -> None:
        self._max_queue = max_queue
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.row_factory = sqlite3.Row
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            # A result that a client knows must survive a power loss.
            self._database.execute("PRAGMA synchronous=FULL")
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._database.executescript(_CREATE)
            elif version != SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"it has version {version}, and this osora reads version {SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            self.close()
            hint = "name another --folder, or use the osora that wrote it"
            raise CheckpointError(f"{path} is not a file of jobs: {error}", hint=hint) from error

    def close(self) -> None:
        self._database.close()

    def add(self, job_id: str, rest: Mapping[str, Any]) -> Job:
        """Append a job with the fields `rest` to the queue. Raises QueueFull if `max_queue` jobs are waiting."""
        if self.counts()[Status.QUEUED] >= self._max_queue:
            raise QueueFull(f"{self._max_queue} videos are waiting already")
        rest = {**rest, "created_at": int(time.time())}
        self._database.execute(
            "INSERT INTO jobs (id, status, rest, place) "
            "VALUES (?, ?, ?, (SELECT COALESCE(MAX(place), 0.0) + 1.0 FROM jobs))",
            (job_id, Status.QUEUED, json.dumps(rest)),
        )
        return self.get(job_id)

    def get(self, job_id: str) -> Job:
        """Return a job. Raises NoJob if there is none with this ID."""
        row = self._database.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None:
            raise NoJob(job_id)
        return _job(row)

    def page(self, *, after: str | None, limit: int, newest_first: bool) -> tuple[list[Job], bool]:
        """Return up to `limit` jobs after the job `after`, by time of creation, and whether more follow.

        Raises NoJob if there is no job `after`.
        """
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        start = None if after is None else self.get(after).number
        query = f"SELECT * FROM jobs WHERE ? IS NULL OR number {sign} ? ORDER BY number {order} LIMIT ?"
        rows = self._database.execute(query, (start, start, limit + 1)).fetchall()
        return [_job(row) for row in rows[:limit]], len(rows) > limit

    def ids(self, status: Status) -> list[str]:
        """Return the IDs of the jobs in a state, in the order of the queue."""
        rows = self._database.execute("SELECT id FROM jobs WHERE status = ? ORDER BY place", (status,))
        return [row[0] for row in rows]

    def counts(self) -> dict[Status, int]:
        rows = self._database.execute("SELECT status, COUNT(*) FROM jobs GROUP BY status")
        return dict.fromkeys(Status, 0) | {Status(status): count for status, count in rows}

    def take(self) -> Job | None:
        """Mark the next queued job as in progress, and return it; None if no job is queued."""
        if (job := self._next()) is None:
            return None
        return self.change(job.id, status=Status.IN_PROGRESS, started_at=job.started_at or int(time.time()))

    def finish(self, job_id: str, status: Status, *, error: Mapping[str, Any] | None = None) -> Job:
        return self.change(job_id, status=status, completed_at=int(time.time()), error=error)

    def requeue(self, job_id: str, *, has_died: bool = False) -> None:
        """Put an unfinished job back at the head of the queue; `has_died` means that its worker died."""
        job, first = self.get(job_id), self._next()
        place = job.place if first is None else min(job.place, first.place - 1.0)
        self.change(job_id, status=Status.QUEUED, deaths=job.deaths + has_died, place=place)

    def place_in_queue(self, job: Job) -> int:
        """Return the number of queued jobs up to this one."""
        query = "SELECT COUNT(*) FROM jobs WHERE status = ? AND place <= ?"
        return int(self._database.execute(query, (Status.QUEUED, job.place)).fetchone()[0])

    def move(self, job_id: str, *, before: str | None) -> None:
        """Put a queued job before another one; None means at the end.

        Raises NoJob if there is no such job, and RequestError if one of them is not queued.
        """
        if before == job_id:
            raise RequestError(f"{job_id} cannot be moved before itself")
        for each in (job_id, before):
            if each is not None and self.get(each).status is not Status.QUEUED:
                raise RequestError(f"{each} is not queued anymore, and cannot be moved")
        order = [each for each in self.ids(Status.QUEUED) if each != job_id]
        order.insert(len(order) if before is None else order.index(before), job_id)
        with self._database:  # also rolls back if the commit fails, as on a full disk
            self._database.execute("BEGIN IMMEDIATE")
            for place, each in enumerate(order, start=1):
                self._database.execute("UPDATE jobs SET place = ? WHERE id = ?", (float(place), each))

    def delete(self, job_id: str) -> None:
        self._database.execute("DELETE FROM jobs WHERE id = ?", (job_id,))

    def _next(self) -> Job | None:
        query = "SELECT * FROM jobs WHERE status = ? ORDER BY place LIMIT 1"
        row = self._database.execute(query, (Status.QUEUED,)).fetchone()
        return None if row is None else _job(row)

    def change(self, job_id: str, **changes: Any) -> Job:
        """Replace fields of a job. Raises NoJob if there is none with this ID."""
        values = asdict(self.get(job_id)) | changes
        rest = json.dumps({name: value for name, value in values.items() if name not in _COLUMNS})
        self._database.execute(
            "UPDATE jobs SET place = ?, status = ?, rest = ? WHERE id = ?",
            (values["place"], values["status"], rest, job_id),
        )
        return self.get(job_id)


def new_id() -> str:
    """Return a random ID, which nobody can guess."""
    return f"video_{secrets.token_hex(12)}"


def _job(row: sqlite3.Row) -> Job:
    columns = {name: row[name] for name in _COLUMNS}
    return Job(**columns | {"status": Status(row["status"])} | json.loads(row["rest"]))
