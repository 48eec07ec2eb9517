"""Application of `osora serve`: the routes of the API, its description, plans, figures and the page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, RedirectResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

import opensora_cli
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.engine.components.few_steps import turbo_path
from opensora_cli.server.guard import COOKIE, ApiError, add_errors, is_token
from opensora_cli.server.jobs import Job, Status
from opensora_cli.server.requests import presets_of, read_request, remixed
from opensora_cli.server.results import SHEET, THUMBNAIL
from opensora_cli.server.uploads import STAND_INS, stand_in
from opensora_cli.server.videos import MEDIA, MOST_FILES, Server, read_body
from opensora_cli.settings.load import load_preset

_PAGE = Path(__file__).parent / "page"
_PARTS = {"/": "index.html", "/style.css": "style.css", "/page.js": "page.js", "/login": "login.html"}
_EXAMPLES = ("raining, sea", "a red boat on the sea, sunset", "snow falls on a city at night")
_LINES_WITH_PATHS = ("weights", "lora", "missing", "writes", "keeps")
_FIELDS_WITH_PATHS = ("weights", "loras", "missing_weights", "outputs", "pictures", "sheet", "settings")


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
    add_errors(app)
    _add_videos(app, server)
    _add_model(app, server)
    _add_page(app, server)
    return app


def _add_videos(app: FastAPI, server: Server) -> None:
    async def found(video_id: str) -> Job:
        return server.job(video_id)

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
        if after is not None:
            server.job(after, param="after")
        jobs, has_more = server.store.page(after=after, limit=limit, newest_first=order == "desc")
        data = [server.answer(job) for job in jobs]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return {"object": "list", "data": data, "has_more": has_more, **ends}

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
        return await server.add(remixed(job.request, values), remixed_from=job.id)

    @app.get("/v1/videos/{video_id}/content")
    async def content(job: Found, variant: Literal["video", "thumbnail", "spritesheet"] = "video") -> FileResponse:
        """Return the file of a finished video, its thumbnail, or a sheet of its frames."""
        path = server.result(job)
        if variant != "video":
            path = path.with_name(THUMBNAIL if variant == "thumbnail" else SHEET)
        name = f"{job.id}{path.suffix}"
        return FileResponse(path, media_type=MEDIA[path.suffix], filename=name, content_disposition_type="inline")

    @app.get("/v1/videos/{video_id}/preview")
    async def preview(job: Found) -> FileResponse:
        """Return the last preview of a running video."""
        if (path := server.preview(job)) is None:
            raise ApiError(404, f"{job.id} has no preview")
        return FileResponse(path, media_type=MEDIA[path.suffix], headers={"Cache-Control": "no-store"})

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
    if isinstance(document, list):
        return [_public(each) for each in document]
    return document


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
