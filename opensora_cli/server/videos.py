"""Videos in the shape of OpenAI's API: requests, answers, files and events."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import FileResponse, StreamingResponse
from starlette.datastructures import UploadFile

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.server.errors import ApiError
from opensora_cli.server.jobs import Job, JobStore, Status, new_id
from opensora_cli.server.requests import command_of, read_request, remixed
from opensora_cli.server.results import SHEET, THUMBNAIL
from opensora_cli.server.scheduler import Scheduler
from opensora_cli.server.uploads import keep
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer

_LARGEST_JSON = 2**20
MOST_FILES = max(mode.max_references for mode in CONDITION_MODES.values())
_MEDIA = {".mp4": "video/mp4", ".png": "image/png", ".webp": "image/webp", ".gif": "image/gif", ".jpg": "image/jpeg"}


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
    max_queue: int
    token: str | None = None

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.usual.model.name

    def job(self, video_id: str) -> Job:
        """Return a job. Raises ApiError if there is none."""
        try:
            return self.store.get(video_id)
        except KeyError:
            raise ApiError(404, f"there is no video {video_id}", param="video_id") from None

    def result(self, job: Job) -> Path:
        """Return the file of a finished video. Raises ApiError if there is none."""
        if job.status is not Status.COMPLETED:
            raise ApiError(409, f"{job.id} is {job.status}: it has no content yet", code="not_completed")
        for path in sorted(self.scheduler.job_folder(job.id).glob("video.*")):
            if path.suffix in _MEDIA and path.stem == "video":  # no preview, no last frame
                return path
        raise ApiError(410, f"the file of {job.id} was removed", code="gone")

    def answer(self, job: Job) -> dict[str, Any]:
        """Return a job as the API shows it."""
        stage = self.scheduler.progress.get(job.id, {})
        done = 100 if job.status is Status.COMPLETED else int(stage.get("percent", 0))
        error = None if job.error is None else {"code": job.error["code"], "message": job.error["message"]}
        folder = self.scheduler.job_folder(job.id)
        return {
            "id": job.id,
            "object": "video",
            "status": job.status,
            "progress": done,
            "created_at": job.created_at,
            "started_at": job.started_at,
            "completed_at": job.completed_at,
            "expires_at": None,
            **job.request,
            "remixed_from_video_id": job.remixed_from,
            "error": error,
            "hint": None if job.error is None else job.error["hint"],
            "exit_code": None if job.error is None else job.error["exit_code"],
            "number": job.number,
            "place": self.store.place_in_queue(job) if job.status is Status.QUEUED else None,
            "stage": dict(stage),
            "preview": next((path.name for path in folder.glob("*.preview.*")), None),
            "command": command_of(job.request),
        }

    async def add(
        self, values: Mapping[str, Any], *, uploads: Sequence[UploadFile] = (), remixed_from: str | None = None
    ) -> Job:
        """Validate a request, and append its job to the queue. The references of the job `remixed_from` are copied.

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
            job = self.store.add(
                fields,
                settings.model_dump(mode="json"),
                job_id=job_id,
                max_queue=self.max_queue,
                remixed_from=remixed_from,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.scheduler.wake()
        return job


async def read_body(request: Request) -> tuple[dict[str, Any], list[UploadFile]]:
    """Return the fields of a request in JSON or of a form, and the uploaded references."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        form = await request.form(max_files=MOST_FILES, max_fields=50)
        uploads = [each for each in form.getlist("input_reference") if isinstance(each, UploadFile)]
        fields: dict[str, Any] = {name: value for name, value in form.items() if name != "input_reference"}
        if isinstance(fields.get("settings"), str):
            fields["settings"] = _json(str(fields["settings"]))
        for name in [name for name in fields if name.startswith("settings[")]:
            if isinstance(settings := fields.setdefault("settings", {}), dict):
                settings[name[9:-1]] = fields.pop(name)
        if len(uploads) < len(form.getlist("input_reference")):
            raise _invalid_reference("input_reference must be an uploaded file")
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


def add_videos(app: FastAPI, server: Server) -> None:
    """Add the routes of videos."""

    @app.post("/v1/videos")
    async def create(request: Request) -> dict[str, Any]:
        """Append a video to the queue."""
        values, uploads = await read_body(request)
        return server.answer(await server.add(values, uploads=uploads))

    @app.get("/v1/videos")
    async def list_videos(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """Return a page of videos, the newest first."""
        try:
            jobs, has_more = server.store.page(after=after, limit=limit, newest_first=order == "desc")
        except KeyError:
            raise ApiError(404, f"there is no video {after}", param="after") from None
        data = [server.answer(job) for job in jobs]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return {"object": "list", "data": data, "has_more": has_more, **ends}

    async def found(video_id: str) -> Job:
        return server.job(video_id)

    Found = Annotated[Job, Depends(found)]

    @app.get("/v1/videos/{video_id}")
    async def retrieve(job: Found) -> dict[str, Any]:
        """Return the state of a video."""
        return server.answer(job)

    @app.delete("/v1/videos/{video_id}")
    async def delete(job: Found) -> dict[str, Any]:
        """Cancel a video if it is not over, and remove it with its files."""
        await server.scheduler.delete(job.id)
        return {"id": job.id, "deleted": True, "object": "video.deleted"}

    @app.post("/v1/videos/{video_id}/cancel")
    async def cancel(job: Found) -> dict[str, Any]:
        """Cancel a queued video, or a running one within a step."""
        return server.answer(await server.scheduler.cancel(job.id))

    @app.post("/v1/videos/{video_id}/move")
    async def move(job: Found, request: Request) -> dict[str, Any]:
        """Put a queued video before another one, or at the end."""
        values, _ = await read_body(request)
        before = values.get("before")
        if before is not None:
            server.job(str(before))
        server.store.move(job.id, before=before)
        server.scheduler.wake()
        return server.answer(server.store.get(job.id))

    @app.post("/v1/videos/{video_id}/remix")
    async def remix(job: Found, request: Request) -> dict[str, Any]:
        """Make a video with the settings of another one; the fields of the request replace them."""
        values, _ = await read_body(request)
        return server.answer(await server.add(remixed(job.request, values), remixed_from=job.id))

    @app.get("/v1/videos/{video_id}/content")
    async def content(job: Found, variant: Literal["video", "thumbnail", "spritesheet"] = "video") -> FileResponse:
        """Return the file of a finished video, its thumbnail, or a sheet of its frames."""
        path = server.result(job)
        if variant != "video":
            path = server.scheduler.job_folder(job.id) / (THUMBNAIL if variant == "thumbnail" else SHEET)
        return FileResponse(
            path, media_type=_MEDIA[path.suffix], filename=f"{job.id}{path.suffix}", content_disposition_type="inline"
        )

    @app.get("/v1/videos/{video_id}/preview")
    async def preview(job: Found) -> FileResponse:
        """Return the last preview of a running video."""
        for path in server.scheduler.job_folder(job.id).glob("*.preview.*"):
            return FileResponse(path, media_type=_MEDIA[path.suffix], headers={"Cache-Control": "no-store"})
        raise ApiError(404, f"{job.id} has no preview")

    @app.get("/v1/videos/{video_id}/events")
    async def events(job: Found) -> StreamingResponse:
        """Stream what happens to a video as server-sent events, until it is over."""
        return _stream(_events_of(server, job.id))

    @app.get("/v1/events")
    async def all_events() -> StreamingResponse:
        """Stream what happens to all videos as server-sent events."""
        return _stream(_events_of(server, None))


def _stream(events: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events_of(server: Server, job_id: str | None) -> AsyncIterator[str]:
    """Yield events of one job until it is over, or of all."""
    since = server.scheduler.event_count
    if job_id is None:
        yield _event(_queue_event(server))
    else:
        job = server.store.get(job_id)
        yield _event({"event": "state", **server.answer(job)})
        if job.status.is_over:
            return
    async for event in server.scheduler.events(since):
        if event is None:
            yield ": ping\n\n"
            continue
        if job_id is not None and event.get("id") != job_id:
            continue
        # Events name jobs, and are completed when they are sent.
        if event["event"] == "queue":
            event = _queue_event(server)
        if event["event"] == "job":
            try:
                event = {"event": "state", **server.answer(server.store.get(event["id"]))}
            except KeyError:  # it was deleted, as another event tells
                continue
        yield _event(event)
        if job_id is not None and (event["event"] == "deleted" or Status(event.get("status", "queued")).is_over):
            return


def _queue_event(server: Server) -> dict[str, Any]:
    ids = server.store.ids
    return {"event": "queue", "queue": ids(Status.QUEUED), "running": ids(Status.IN_PROGRESS)}


def _event(event: Mapping[str, Any]) -> str:
    return f"event: {event['event']}\ndata: {json.dumps(event)}\n\n"
