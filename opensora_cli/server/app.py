"""Application of `osora serve`: videos in the shape of OpenAI's API, their events, plans, figures, and the page."""

import asyncio
import errno
import hmac
import json
import logging
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, RedirectResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import opensora_cli
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import MediaError, OsoraError
from opensora_cli.engine.components.few_steps import turbo_path
from opensora_cli.server.jobs import Job, JobStore, NoJob, QueueFull, Status, new_id
from opensora_cli.server.requests import MOST_FILES, ApiError, command_of, presets_of, read_body, read_request, remixed
from opensora_cli.server.results import SHEET, THUMBNAIL
from opensora_cli.server.scheduler import Scheduler
from opensora_cli.server.uploads import STAND_INS, keep, stand_in, without_paths
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer
from opensora_cli.settings.load import load_preset

COOKIE = "osora_token"
_MEDIA = {".mp4": "video/mp4", ".png": "image/png", ".webp": "image/webp", ".gif": "image/gif", ".jpg": "image/jpeg"}
_PAGE = Path(__file__).parent / "page"
_PARTS = {"/": "index.html", "/style.css": "style.css", "/page.js": "page.js", "/login": "login.html"}
_EXAMPLES = ("raining, sea", "a red boat on the sea, sunset", "snow falls on a city at night")
_LINES_WITH_PATHS = ("weights", "lora", "missing", "writes", "keeps")
_FIELDS_WITH_PATHS = ("weights", "loras", "missing_weights", "outputs", "pictures", "sheet", "settings")
_FULL_DISK = "the disk of the server is full"


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

    async def add(
        self, values: Mapping[str, Any], *, uploads: Sequence[UploadFile] = (), remixed_from: str | None = None
    ) -> dict[str, Any]:
        """Append the job of a request to the queue, and return its answer. The references of the job `remixed_from`
        are copied.

        Raises QueueFull if too many wait, and other errors of OsoraError if the request is wrong.
        """
        if self.scheduler.is_disk_full():
            raise ApiError(507, _FULL_DISK, code="disk_full")
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

    def result(self, job: Job) -> Path:
        """Return the file of a finished video. Raises ApiError if there is none."""
        if job.status is not Status.COMPLETED:
            raise ApiError(409, f"{job.id} is {job.status}: it has no content yet", code="not_completed")
        for path in self.scheduler.job_folder(job.id).glob("video.*"):
            if path.suffix in _MEDIA and path.stem == "video":  # no preview, no last frame
                return path
        raise ApiError(410, f"the file of {job.id} was removed", code="gone")

    def preview(self, job: Job) -> Path | None:
        return next(self.scheduler.job_folder(job.id).glob("*.preview.*"), None)

    async def events(self, job_id: str | None) -> AsyncIterator[str]:
        """Yield the server-sent events of one job until it is over, or of all."""
        first = {"event": "queue"} if job_id is None else {"event": "job", "id": job_id}
        async for event in self.scheduler.events(self.scheduler.event_count, first):
            if event is None:
                yield ": ping\n\n"
            elif job_id is None or event.get("id") == job_id:
                with suppress(NoJob):  # it was deleted, as another event tells
                    event = self._completed(event)
                    yield f"event: {event['event']}\ndata: {json.dumps(event)}\n\n"
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


def make_app(server: Server) -> FastAPI:
    """Return the application of a server."""
    app = FastAPI(title="osora", version=opensora_cli.__version__, docs_url=None, redoc_url=None)
    kinds = (ApiError, HTTPException, RequestValidationError, ClientDisconnect, NoJob, OsoraError)
    for kind in (*kinds, OSError, sqlite3.OperationalError, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_videos(app, server)
    _add_model(app, server)
    _add_page(app, server)
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    return _api_error(error).response()


def _api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RequestValidationError():
            first = error.errors()[0]
            return ApiError(400, first["msg"], code="invalid_value", param=str(first["loc"][-1]))
        case ClientDisconnect():  # nobody reads the answer
            return ApiError(400, "the client left")
        case NoJob():
            return ApiError(404, f"there is no video {error.args[0]}", param="video_id")
        case OsoraError():
            message = without_paths(error.message if error.hint is None else f"{error.message}: {error.hint}")
            code = re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
            if isinstance(error, QueueFull):
                return ApiError(429, message, code=code, headers={"Retry-After": "30"})
            status = 400 if error.exit_code == 2 or isinstance(error, MediaError) else 500
            return ApiError(status, message, code=code, param=getattr(error, "field", None))
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ApiError(507, _FULL_DISK, code="disk_full")
        case sqlite3.OperationalError() if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            return ApiError(507, _FULL_DISK, code="disk_full")
        case OSError() | sqlite3.OperationalError():
            logging.getLogger("uvicorn.error").error("a file cannot be used", exc_info=error)
            reason = getattr(error, "strerror", None) or type(error).__name__
            return ApiError(500, f"the server cannot use one of its files: {reason}", code="file_error")
    # The framework raises the error again, and uvicorn logs its traceback.
    return ApiError(500, "the server has a bug, and its log has the details", code="internal_error")


def _add_videos(app: FastAPI, server: Server) -> None:
    async def found(video_id: str) -> Job:
        return server.store.get(video_id)

    Found = Annotated[Job, Depends(found)]

    @app.post("/v1/videos")
    async def create(request: Request) -> dict[str, Any]:
        """Append a video to the queue."""
        values, uploads = await read_body(request)
        return await server.add(values, uploads=uploads)

    @app.get("/v1/videos")
    async def list_videos(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """Return a page of videos, the newest first."""
        jobs, has_more = server.store.page(after=after, limit=limit, newest_first=order == "desc")
        data = [server.answer(job) for job in jobs]
        first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"object": "list", "data": data, "has_more": has_more, "first_id": first_id, "last_id": last_id}

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
        server.store.move(job.id, before=None if before is None else str(before))
        server.scheduler.wake()
        return server.answer(server.store.get(job.id))

    @app.post("/v1/videos/{video_id}/remix")
    async def remix(job: Found, request: Request) -> dict[str, Any]:
        """Make a video with the settings of another one; the fields of the request replace them."""
        values, _ = await read_body(request)
        return await server.add(remixed(job.request, values), remixed_from=job.id)

    @app.get("/v1/videos/{video_id}/content")
    async def content(job: Found, variant: Literal["video", "thumbnail", "spritesheet"] = "video") -> FileResponse:
        """Return the file of a finished video, its thumbnail, or a sheet of its frames."""
        path = server.result(job)
        if variant != "video":
            path = path.with_name(THUMBNAIL if variant == "thumbnail" else SHEET)
        name = f"{job.id}{path.suffix}"
        return FileResponse(path, media_type=_MEDIA[path.suffix], filename=name, content_disposition_type="inline")

    @app.get("/v1/videos/{video_id}/preview")
    async def preview(job: Found) -> FileResponse:
        """Return the last preview of a running video."""
        if (path := server.preview(job)) is None:
            raise ApiError(404, f"{job.id} has no preview")
        return FileResponse(path, media_type=_MEDIA[path.suffix], headers={"Cache-Control": "no-store"})

    def stream(job_id: str | None) -> StreamingResponse:
        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(server.events(job_id), media_type="text/event-stream", headers=headers)

    @app.get("/v1/videos/{video_id}/events")
    async def events(job: Found) -> StreamingResponse:
        """Stream what happens to a video as server-sent events, until it is over."""
        return stream(job.id)

    @app.get("/v1/events")
    async def all_events() -> StreamingResponse:
        """Stream what happens to all videos as server-sent events."""
        return stream(None)


def _add_model(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """Return the model that is loaded, and whether it has a few-step adapter for `settings.turbo`."""
        has_turbo = turbo_path(server.usual).exists()
        model = {"id": server.model, "object": "model", "created": 0, "owned_by": "osora", "turbo": has_turbo}
        return {"object": "list", "data": [model]}

    @app.get("/v1/options")
    async def options() -> dict[str, Any]:
        """Return the choices and defaults of the model, for forms."""
        presets = {name: load_preset(name) for name in presets_of(server.model)}
        video = server.usual.video
        return {
            "model": server.model,
            "presets": [
                {
                    "name": name,
                    "res": preset.video.resolution,
                    "aspect_ratio": preset.video.aspect_ratio,
                    "num_frames": preset.video.num_frames,
                    "steps": preset.sampling.num_inference_steps,
                }
                for name, preset in presets.items()
            ],
            "resolutions": video.resolutions,
            "aspect_ratios": video.aspect_ratios,
            "max_frames": video.max_frames,
            "modes": {mode.name: mode.max_references for mode in CONDITION_MODES.values() if mode.needs_reference},
            "examples": _EXAMPLES,
        }

    @app.post("/v1/plan")
    async def plan(request: Request) -> dict[str, Any]:
        """Return the plan of a request, as `osora generate --dry-run` prints it, without the files of the server.

        `references` lists the kinds of files that the video will have: `picture` or `video`.
        """
        values, _ = await read_body(request)
        kinds, folder = values.pop("references", []), server.folder / "plan"
        if not isinstance(kinds, list) or len(kinds) > MOST_FILES or any(kind not in [*STAND_INS] for kind in kinds):
            raise ApiError(400, f"references must be up to {MOST_FILES} of {', '.join(STAND_INS)}", param="references")
        references = [await asyncio.to_thread(stand_in, kind, folder) for kind in kinds]
        settings, _ = await asyncio.to_thread(
            read_request, values, model=server.model, base=server.base, folder=folder, references=references
        )
        report = await server.scheduler.plan(settings.model_dump(mode="json"))
        if (error := report.get("error")) is not None:
            message = error["message"] if error["hint"] is None else f"{error['message']}: {error['hint']}"
            raise ApiError(400 if error["exit_code"] == 2 else 500, message, code="plan_failed")
        lines = [line for line in report["lines"] if line.split()[0] not in _LINES_WITH_PATHS]
        notes = [note for note in report["notes"] if not any(path.name in note for path in references)]
        return {"plan": _public(report["plan"]), "lines": lines, "notes": notes}

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Return whether the server makes videos; 503 if a bug stopped it."""
        if server.scheduler.problem is not None:
            raise ApiError(503, server.scheduler.problem, code="stopped")
        return {"status": "ok"}

    @app.get("/metrics")
    async def measured() -> Response:
        """Return figures for Prometheus: jobs by state, seconds of work by stage, and the length of the queue."""
        registry, counts = CollectorRegistry(), server.store.counts()
        jobs = Gauge("osora_jobs", "Jobs by state.", ["status"], registry=registry)
        for status, count in counts.items():
            jobs.labels(status).set(count)
        Gauge("osora_queue_length", "Jobs that wait.", registry=registry).set(counts[Status.QUEUED])
        worked = Gauge("osora_stage_seconds_total", "Seconds of work by stage.", ["stage"], registry=registry)
        for stage, each in server.scheduler.seconds.items():
            worked.labels(stage).set(each)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _public(document: Any) -> Any:
    """Return a plan without the fields that name files of the server."""
    if isinstance(document, dict):
        return {name: _public(each) for name, each in document.items() if name not in _FIELDS_WITH_PATHS}
    return [_public(each) for each in document] if isinstance(document, list) else document


def _add_page(app: FastAPI, server: Server) -> None:
    @app.post("/login")
    async def login(request: Request) -> Response:
        """Keep the token in a cookie of the page."""
        form = await request.form(max_files=0, max_fields=1)
        token = str(form.get("token", ""))
        if not is_token(token, server.token):
            raise ApiError(401, "the token is wrong")
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return answer

    @app.get("/favicon.ico", include_in_schema=False)
    async def no_icon() -> Response:
        return Response(status_code=204)

    def part(request: Request) -> FileResponse:
        return FileResponse(_PAGE / _PARTS[request.scope["path"]], headers={"Cache-Control": "no-cache"})

    for path in _PARTS:
        app.add_route(path, part, include_in_schema=False)


def is_token(given: str, token: str | None) -> bool:
    """Return whether a text is the token, in a time that does not depend on where they differ."""
    return token is not None and hmac.compare_digest(given.encode(), token.encode())
