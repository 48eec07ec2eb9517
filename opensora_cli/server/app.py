"""Routes of `osora serve`: videos in the shape of OpenAI's API, plans, events, metrics and the page."""

import asyncio
import html
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, StreamingResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import opensora_cli
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.exceptions import MediaError, OsoraError
from opensora_cli.server import metrics
from opensora_cli.server.guard import COOKIE, is_token
from opensora_cli.server.jobs import Job, JobStore, QueueFull, Status, new_id
from opensora_cli.server.requests import SIZE, InvalidField, command_of, presets_of, read_request
from opensora_cli.server.results import SHEET, THUMBNAIL
from opensora_cli.server.scheduler import Scheduler
from opensora_cli.server.uploads import keep
from opensora_cli.settings.layers import Layer
from opensora_cli.settings.load import load_preset

_PAGE = Path(__file__).parent / "page"
_EXAMPLES = ("raining, sea", "a red boat on the sea, sunset", "snow falls on a city at night")
_LOGIN = """<form method="post" action="/login">
<label for="token">Token, from the file that the server was started with</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button type="submit">Enter</button>
</form>"""
_LARGEST_JSON = 2**20
_MOST_FILES = max(mode.max_references for mode in CONDITION_MODES.values())
_PING_S = 15.0
_RETRY_AFTER_S = 30
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "too_large"}
_MEDIA = {".mp4": "video/mp4", ".png": "image/png", ".webp": "image/webp", ".gif": "image/gif", ".jpg": "image/jpeg"}


class ApiError(Exception):
    """An answer with an error."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"code": code, "message": message, "param": param, "type": kind}}
        self.status = status


class Server:
    """Jobs, their scheduler, and the settings of the server, which all routes share."""

    def __init__(
        self,
        *,
        store: JobStore,
        folder: Path,
        model: str,
        base: Layer,
        groups: int,
        max_queue: int,
        token: str | None,
    ) -> None:
        self.store, self.folder = store, folder
        self.scheduler = Scheduler(store, folder, groups=groups)
        self.model, self.base, self.max_queue, self.token = model, base, max_queue, token

    def job(self, video_id: str) -> Job:
        """Return a job. Raises ApiError if there is none."""
        try:
            return self.store.get(video_id)
        except KeyError:
            raise ApiError(404, "not_found", f"there is no video {video_id}", param="video_id") from None

    def result(self, job: Job) -> Path:
        """Return the file of a finished video. Raises ApiError if there is none."""
        if job.status is not Status.COMPLETED:
            raise ApiError(409, "not_completed", f"{job.id} is {job.status}: it has no content yet")
        for path in sorted(self.scheduler.job_folder(job.id).glob("video.*")):
            if path.suffix in _MEDIA and ".preview" not in path.name:
                return path
        raise ApiError(410, "gone", f"the file of {job.id} was removed")

    def answer(self, job: Job) -> dict[str, Any]:
        """Return a job as the API shows it."""
        stage = self.scheduler.progress.get(job.id, {})
        done = 100 if job.status is Status.COMPLETED else int(stage.get("percent", 0))
        error = None if job.error is None else {"code": job.error["code"], "message": job.error["message"]}
        folder = self.scheduler.job_folder(job.id)
        return {
            "id": job.id,
            "object": "video",
            "model": job.request["model"],
            "status": job.status,
            "progress": done,
            "created_at": job.created_at,
            "started_at": job.started_at,
            "completed_at": job.completed_at,
            "expires_at": None,
            "prompt": job.request["prompt"],
            "seconds": job.request["seconds"],
            "size": job.request["size"],
            "remixed_from_video_id": job.remixed_from,
            "error": error,
            "hint": None if job.error is None else job.error["hint"],
            "place": self.store.place_in_queue(job) if job.status is Status.QUEUED else None,
            "stage": dict(stage),
            "settings": job.request["settings"],
            "seed": job.request["seed"],
            "num_frames": job.request["num_frames"],
            "fps": job.request["fps"],
            "num_references": job.request["num_references"],
            "preview": next((path.name for path in folder.glob("*.preview.*")), None),
            "command": command_of(job.request),
        }

    async def add(
        self,
        values: Mapping[str, Any],
        *,
        uploads: Sequence[UploadFile] = (),
        remixed_from: Job | None = None,
    ) -> Job:
        """Validate a request, and append its job to the queue. The references of another job are copied.

        Raises QueueFull if too many wait, and other errors of OsoraError if the request is wrong.
        """
        if self.scheduler.is_disk_full():
            raise ApiError(507, "disk_full", "the disk of the server is full")
        job_id = new_id()
        folder = self.scheduler.job_folder(job_id)
        try:
            references = [await keep(upload, folder, number=number) for number, upload in enumerate(uploads)]
            if remixed_from is not None:
                for path in sorted(self.scheduler.job_folder(remixed_from.id).glob("reference_*")):
                    folder.mkdir(parents=True, exist_ok=True)
                    references.append(await asyncio.to_thread(shutil.copyfile, path, folder / path.name))
            request = await asyncio.to_thread(
                read_request, values, model=self.model, base=self.base, folder=folder, references=references
            )
            folder.mkdir(parents=True, exist_ok=True)
            job = self.store.add(
                request.fields,
                request.settings.model_dump(mode="json"),
                job_id=job_id,
                max_queue=self.max_queue,
                remixed_from=None if remixed_from is None else remixed_from.id,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.scheduler.wake()
        return job


async def _values(request: Request) -> tuple[dict[str, Any], list[UploadFile]]:
    """Return the fields of a request in JSON or of a form, and the uploaded references."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        form = await request.form(max_files=_MOST_FILES, max_fields=50)
        uploads = [each for each in form.getlist("input_reference") if isinstance(each, UploadFile)]
        fields: dict[str, Any] = {name: value for name, value in form.items() if name != "input_reference"}
        if isinstance(fields.get("settings"), str):
            fields["settings"] = _json(str(fields["settings"]))
        for name in [name for name in fields if name.startswith("settings[")]:
            fields.setdefault("settings", {})[name[9:-1]] = fields.pop(name)
        if len(uploads) < len(form.getlist("input_reference")):
            raise ApiError(
                400, "invalid_reference", "input_reference must be an uploaded file", param="input_reference"
            )
        return fields, uploads
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_JSON:
            raise ApiError(413, "too_large", f"a request in JSON may have {_LARGEST_JSON} bytes")
    values = _json(body.decode("utf-8", "replace"))
    if not isinstance(values, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    if "input_reference" in values:
        raise ApiError(
            400, "invalid_reference", "input_reference must be uploaded as multipart/form-data", param="input_reference"
        )
    return values, []


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is no JSON") from None


def make_app(server: Server) -> FastAPI:
    """Return the application of a server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(server.scheduler.run())
        try:
            yield
        finally:
            # The scheduler was stopped before the connections, of which some may never end.
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = FastAPI(title="osora", version=opensora_cli.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_videos(app, server)
    _add_others(app, server)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(OsoraError)
    async def osora_error(_: Request, error: OsoraError) -> JSONResponse:
        status = 400 if error.exit_code == 2 or isinstance(error, MediaError) else 500
        headers = None
        if isinstance(error, QueueFull):
            status, headers = 429, {"Retry-After": str(_RETRY_AFTER_S)}
        code = "".join(f"_{each.lower()}" if each.isupper() else each for each in type(error).__name__).strip("_")
        message = error.message if error.hint is None else f"{error.message}: {error.hint}"
        param = error.field if isinstance(error, InvalidField) else None
        return JSONResponse(ApiError(status, code, message, param=param).body, status, headers=headers)

    @app.exception_handler(OSError)
    @app.exception_handler(sqlite3.OperationalError)
    async def disk_error(_: Request, error: OSError | sqlite3.OperationalError) -> JSONResponse:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return JSONResponse(ApiError(507, "disk_error", f"the server cannot write: {reason}").body, 507)

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse(ApiError(400, "invalid_value", first["msg"], param=str(first["loc"][-1])).body, 400)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        body = ApiError(error.status_code, _CODES.get(error.status_code, "invalid_request"), str(error.detail)).body
        return JSONResponse(body, error.status_code, headers=error.headers)


def _add_videos(app: FastAPI, server: Server) -> None:
    @app.post("/v1/videos")
    async def create(request: Request) -> dict[str, Any]:
        """Append a video to the queue."""
        values, uploads = await _values(request)
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
            raise ApiError(404, "not_found", f"there is no video {after}", param="after") from None
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
        values, _ = await _values(request)
        before = values.get("before")
        if before is not None:
            server.job(str(before))
        server.store.move(job.id, before=before)
        server.scheduler.wake()
        return server.answer(server.store.get(job.id))

    @app.post("/v1/videos/{video_id}/remix")
    async def remix(job: Found, request: Request) -> dict[str, Any]:
        """Make a video with the settings of another one, but for those that are given."""
        values, _ = await _values(request)
        before = job.request
        fields = {name: before[name] for name in ("prompt", "seed", "settings")} | values
        if SIZE.fullmatch(before["size"]):
            fields.setdefault("size", before["size"])
        if isinstance(fields["settings"], dict):
            fields["settings"] = before["settings"] | fields["settings"]
        return server.answer(await server.add(fields, remixed_from=job))

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
        raise ApiError(404, "not_found", f"{job.id} has no preview")

    @app.get("/v1/videos/{video_id}/events")
    async def events(job: Found) -> StreamingResponse:
        """Stream what happens to a video as server-sent events, until it is over."""
        return _stream(_events_of(server, job.id))


def _add_others(app: FastAPI, server: Server) -> None:
    @app.get("/v1/events")
    async def all_events() -> StreamingResponse:
        """Stream what happens to all videos as server-sent events."""
        return _stream(_events_of(server, None))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Return the model that is loaded."""
        model = {"id": server.model, "object": "model", "created": 0, "owned_by": "osora"}
        return {"object": "list", "data": [model]}

    @app.get("/v1/options")
    async def options() -> dict[str, Any]:
        """Return the choices and defaults of the model, for forms."""
        presets = [(name, load_preset(name, prompt="any")) for name in presets_of(server.model)]
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
                for name, preset in presets
            ],
            "resolutions": list(presets[0][1].video.resolutions),
            "aspect_ratios": list(presets[0][1].video.aspect_ratios),
            "max_frames": presets[0][1].video.max_frames,
            "modes": {mode.name: mode.max_references for mode in CONDITION_MODES.values() if mode.needs_reference},
            "examples": list(_EXAMPLES),
        }

    @app.post("/v1/plan")
    async def plan(request: Request) -> dict[str, Any]:
        """Return the plan of a request, as `osora generate --dry-run` prints it."""
        values, _ = await _values(request)
        read = await asyncio.to_thread(
            read_request, values, model=server.model, base=server.base, folder=server.folder / "plan"
        )
        report = await server.scheduler.plan(read.settings.model_dump(mode="json"))
        return {"plan": report["plan"], "lines": report["lines"], "notes": report["notes"]}

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Return whether the server answers."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def measured() -> Response:
        """Return figures for Prometheus."""
        text = metrics.exposition(server.store.counts(), server.scheduler.seconds)
        return Response(text, media_type=metrics.MEDIA_TYPE)

    @app.post("/login")
    async def login(request: Request) -> Response:
        """Keep the token in a cookie of the page."""
        form = await request.form(max_files=0, max_fields=1)
        token = str(form.get("token", ""))
        if not is_token(token, server.token):
            raise ApiError(401, "wrong_token", "the token is wrong")
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https")
        return answer

    @app.get("/favicon.ico", include_in_schema=False)
    async def no_icon() -> Response:
        return Response(status_code=204)

    @app.get("/login", include_in_schema=False)
    async def login_page() -> Response:
        return _plain_page("token", _LOGIN)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return _plain_page("API", _description(app.openapi()["paths"]))

    for path, file in (("/", "index.html"), ("/style.css", "style.css"), ("/page.js", "page.js")):
        app.add_api_route(path, _file_route(_PAGE / file), methods=["GET"], include_in_schema=False)


def _file_route(path: Path) -> Any:
    async def route() -> FileResponse:
        return FileResponse(path, headers={"Cache-Control": "no-cache"})

    return route


def _plain_page(title: str, body: str) -> Response:
    template = Template((_PAGE / "plain.html").read_text("utf-8"))
    return HTMLResponse(template.substitute(title=title, body=body))


def _description(paths: Mapping[str, Any]) -> str:
    """Return the routes as HTML, without the programs of another host that FastAPI's own page loads."""
    lines = ["<p>Errors are <code>{error: {code, message, param, type}}</code>. <a href=/openapi.json>openapi.json</a>"]
    for path, methods in paths.items():
        for method, route in methods.items():
            names = ", ".join(parameter["name"] for parameter in route.get("parameters", ()))
            about = html.escape(route["description"]) + (f" Parameters: {names}." if names else "")
            lines.append(f"<dt>{method.upper()} {path}<dd>{about}")
    return "\n".join([lines[0], "<dl>", *lines[1:], "</dl>"])


def _stream(events: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events_of(server: Server, job_id: str | None) -> AsyncIterator[str]:
    """Yield events of one job until it is over, or of all."""
    async with server.scheduler.listening() as queue:
        if job_id is not None:
            job = server.store.get(job_id)
            yield _event({"event": "state", **server.answer(job)})
            if job.status.is_over:
                return
        else:
            yield _event(_queue_event(server))
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), _PING_S)
            except TimeoutError:
                yield ": ping\n\n"
                continue
            if event is None:
                return
            if job_id is not None and event.get("id") != job_id:
                continue
            # Events name jobs, and are completed when they are sent: those that wait for a slow listener are small.
            if event["event"] == "queue":
                event = _queue_event(server)
            if event["event"] == "job":
                with suppress(KeyError):
                    event = {"event": "state", **server.answer(server.store.get(event["id"]))}
            yield _event(event)
            if job_id is not None and event["event"] == "state" and Status(event["status"]).is_over:
                return


def _queue_event(server: Server) -> dict[str, Any]:
    ids = server.store.ids
    return {"event": "queue", "queue": ids(Status.QUEUED), "running": ids(Status.IN_PROGRESS)}


def _event(event: Mapping[str, Any]) -> str:
    return f"event: {event['event']}\ndata: {json.dumps(event)}\n\n"
