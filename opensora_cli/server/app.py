"""Application of `osora serve`: the API, its description, plans, figures and the page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

import opensora_cli
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.engine.components.few_steps import turbo_path
from opensora_cli.server.errors import ApiError, add_errors
from opensora_cli.server.guard import COOKIE, is_token
from opensora_cli.server.jobs import Status
from opensora_cli.server.requests import presets_of, read_request
from opensora_cli.server.results import STAND_INS, stand_in
from opensora_cli.server.videos import MOST_FILES, Server, add_videos, read_body
from opensora_cli.settings.load import load_preset

_PAGE = Path(__file__).parent / "page"
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
    add_videos(app, server)
    _add_others(app, server)
    return app


def _add_others(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """Return the model that is loaded, and whether it has a few-step adapter for `settings.turbo`."""
        has_turbo = turbo_path(server.usual).exists()
        model = {"id": server.model, "object": "model", "created": 0, "owned_by": "osora", "turbo": has_turbo}
        return {"object": "list", "data": [model]}

    @app.get("/v1/options")
    async def options() -> dict[str, Any]:
        """Return the choices and defaults of the model, for forms."""
        presets = {name: load_preset(name, prompt="any") for name in presets_of(server.model)}
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
        """Return figures for Prometheus."""
        return Response(_figures(server), media_type=CONTENT_TYPE_LATEST)

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

    def add_file(path: str, name: str) -> None:
        @app.get(path, include_in_schema=False)
        async def file() -> FileResponse:
            return FileResponse(_PAGE / name, headers={"Cache-Control": "no-cache"})

    add_file("/", "index.html")
    for name in ("style.css", "page.js"):
        add_file(f"/{name}", name)
    add_file("/login", "login.html")


def _public(document: Any) -> Any:
    """Return a plan without the fields that name files of the server."""
    if isinstance(document, dict):
        return {name: _public(each) for name, each in document.items() if name not in _FIELDS_WITH_PATHS}
    if isinstance(document, list):
        return [_public(each) for each in document]
    return document


def _figures(server: Server) -> bytes:
    """Return jobs by state, seconds of work by stage, and the length of the queue."""
    registry, counts = CollectorRegistry(), server.store.counts()
    jobs = Gauge("osora_jobs", "Jobs by state.", ["status"], registry=registry)
    for status, count in counts.items():
        jobs.labels(status).set(count)
    Gauge("osora_queue_length", "Jobs that wait.", registry=registry).set(counts[Status.QUEUED])
    worked = Gauge("osora_stage_seconds_total", "Seconds of work by stage.", ["stage"], registry=registry)
    for stage, each in server.scheduler.seconds.items():
        worked.labels(stage).set(each)
    return generate_latest(registry)
