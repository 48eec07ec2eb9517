"""Videos in the shape of OpenAI's API: the state that all routes share, bodies of requests, answers and events."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.server.guard import ApiError
from opensora_cli.server.jobs import Job, JobStore, Status, new_id
from opensora_cli.server.requests import command_of, read_request
from opensora_cli.server.scheduler import Scheduler
from opensora_cli.server.uploads import keep
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer

MOST_FILES = max(mode.max_references for mode in CONDITION_MODES.values())
MEDIA = {".mp4": "video/mp4", ".png": "image/png", ".webp": "image/webp", ".gif": "image/gif", ".jpg": "image/jpeg"}
_LARGEST_JSON = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Jobs, their scheduler, and the settings of the server, which all routes share."""

    store: JobStore
    scheduler: Scheduler
    folder: Path
    usual: GenerateSettings
    """Settings of a video that asks for nothing else."""
    base: Layer
    """Settings of all videos that requests may replace."""
    token: str | None = None

    @property
    def model(self) -> str:
        return self.usual.model.name

    def job(self, video_id: str, *, param: str = "video_id") -> Job:
        """Return a job. Raises ApiError if there is none."""
        try:
            return self.store.get(video_id)
        except KeyError:
            raise ApiError(404, f"there is no video {video_id}", param=param) from None

    def result(self, job: Job) -> Path:
        """Return the file of a finished video. Raises ApiError if there is none."""
        if job.status is not Status.COMPLETED:
            raise ApiError(409, f"{job.id} is {job.status}: it has no content yet", code="not_completed")
        for path in sorted(self.scheduler.job_folder(job.id).glob("video.*")):
            if path.suffix in MEDIA and path.stem == "video":  # no preview, no last frame
                return path
        raise ApiError(410, f"the file of {job.id} was removed", code="gone")

    def preview(self, job: Job) -> Path | None:
        return next(self.scheduler.job_folder(job.id).glob("*.preview.*"), None)

    def answer(self, job: Job) -> dict[str, Any]:
        stage, error, preview = self.scheduler.progress.get(job.id, {}), job.error or {}, self.preview(job)
        return {
            "id": job.id,
            "object": "video",
            "status": job.status,
            "progress": 100 if job.status is Status.COMPLETED else int(stage.get("percent", 0)),
            "created_at": job.created_at,
            "started_at": job.started_at,
            "completed_at": job.completed_at,
            "expires_at": None,
            **job.request,
            "remixed_from_video_id": job.remixed_from,
            "error": {"code": error["code"], "message": error["message"]} if error else None,
            "hint": error.get("hint"),
            "exit_code": error.get("exit_code"),
            "number": job.number,
            "place": self.store.place_in_queue(job) if job.status is Status.QUEUED else None,
            "stage": stage,
            "preview": preview and preview.name,
            "command": command_of(job.request),
        }

    async def add(
        self, values: Mapping[str, Any], *, uploads: Sequence[UploadFile] = (), remixed_from: str | None = None
    ) -> dict[str, Any]:
        """Append the job of a request to the queue, and return its answer. The references of the job `remixed_from`
        are copied.

        Raises QueueFull if too many wait, and other errors of OsoraError if the request is wrong.
        """
        if self.scheduler.is_disk_full():
            raise ApiError(507, "the disk of the server is full")
        job_id = new_id()
        folder = self.scheduler.job_folder(job_id)
        try:
            folder.mkdir(parents=True)
            references = [await keep(upload, folder, number=number) for number, upload in enumerate(uploads)]
            if remixed_from is not None:
                for path in sorted(self.scheduler.job_folder(remixed_from).glob("reference_*")):
                    references.append(await asyncio.to_thread(shutil.copyfile, path, folder / path.name))
            settings, fields = await asyncio.to_thread(
                read_request, values, model=self.model, base=self.base, folder=folder, references=references
            )
            rest = {"request": fields, "settings": settings.model_dump(mode="json"), "remixed_from": remixed_from}
            job = self.store.add(job_id, rest)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.scheduler.wake()
        return self.answer(job)

    async def events(self, job_id: str | None) -> AsyncIterator[str]:
        """Yield the server-sent events of one job until it is over, or of all."""
        since = self.scheduler.event_count
        if job_id is None:
            yield _sent(self._completed({"event": "queue"}))
        else:
            job = self.store.get(job_id)
            yield _sent({"event": "state", **self.answer(job)})
            if job.status.is_over:
                return
        async for event in self.scheduler.events(since):
            if event is None:
                yield ": ping\n\n"
            elif job_id is None or event.get("id") == job_id:
                try:
                    event = self._completed(event)
                except KeyError:  # it was deleted, as another event tells
                    continue
                yield _sent(event)
                if job_id and (event["event"] == "deleted" or Status(event.get("status", "queued")).is_over):
                    return

    def _completed(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an event with the state of what it names when it is sent."""
        if event["event"] == "queue":
            ids = self.store.ids
            return {"event": "queue", "queue": ids(Status.QUEUED), "running": ids(Status.IN_PROGRESS)}
        if event["event"] == "job":
            return {"event": "state", **self.answer(self.store.get(event["id"]))}
        return event


def _sent(event: Mapping[str, Any]) -> str:
    return f"event: {event['event']}\ndata: {json.dumps(event)}\n\n"


async def read_body(request: Request) -> tuple[dict[str, Any], list[UploadFile]]:
    """Return the fields of a request in JSON or of a form, and the uploaded references."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        form = await request.form(max_files=MOST_FILES, max_fields=50)
        given = form.getlist("input_reference")
        uploads = [each for each in given if isinstance(each, UploadFile)]
        if len(uploads) < len(given):
            raise _invalid_reference("input_reference must be an uploaded file")
        fields: dict[str, Any] = {name: value for name, value in form.items() if name != "input_reference"}
        if isinstance(fields.get("settings"), str):
            fields["settings"] = _json(str(fields["settings"]))
        for name in [name for name in fields if name.startswith("settings[")]:
            if isinstance(settings := fields.setdefault("settings", {}), dict):
                settings[name[9:-1]] = fields.pop(name)
        return fields, uploads
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_JSON:
            raise ApiError(413, f"a request in JSON may have {_LARGEST_JSON} bytes")
    values = _json(body.decode("utf-8", "replace"))
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if "input_reference" in values:
        raise _invalid_reference("input_reference must be uploaded as multipart/form-data")
    return values, []


def _json(text: str) -> Any:
    try:
        values = json.loads(text)
        # What an answer cannot repeat is refused, too: NaN, and halves of surrogate pairs.
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
        return values
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON", code="invalid_json") from None


def _invalid_reference(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_reference", param="input_reference")
