"""A fake engine: the command line is tested without torch and without weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import Reporter
from opensora_cli.models.registry import AUTO, DEMO
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_generate_settings


class FakeResult(Document):
    SCHEMA = "fake/1"

    settings: GenerateSettings
    shortage: Any = Field(default=None, exclude=True)
    videos: tuple[Any, ...] = Field(default=(), exclude=True)

    def lines(self) -> list[str]:
        return ["samples/原野.mp4"]

    def raise_for_problems(self) -> None:
        if self.shortage:
            raise self.shortage


@dataclass
class FakeEngine:
    """Takes the demo where it may choose, and remembers what it was asked for."""

    settings: GenerateSettings | None = None
    planned: bool = False
    reporter: Reporter | None = None
    shortage: HardwareError | None = None
    while_running: Callable[[Reporter], None] = field(default=lambda reporter: None)

    def generate(self, settings, *, reporter, context, rank_flags):
        return self._run(settings, reporter)

    def plan_generation(self, settings, *, reporter, on, context):
        self.planned = True
        return self._run(settings, reporter)

    def resolve(self, request, *, reporter, context=None, loading=None):
        return load_generate_settings(request, model=DEMO if request.model == AUTO else request.model)

    def _run(self, settings, reporter):
        self.settings, self.reporter = settings, reporter
        self.while_running(reporter)
        return FakeResult(settings=settings, shortage=self.shortage)
