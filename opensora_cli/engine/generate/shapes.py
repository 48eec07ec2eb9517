"""Rows of a file of prompts that have one plan, and what is wrong with the others."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

from pydantic import ValidationError

from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.components.hardware import versions
from opensora_cli.engine.components.weights import find_weights, require_weights_of, stamp_of
from opensora_cli.engine.generate.draft import draft_settings
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.loaded import LoadedModels
from opensora_cli.engine.generate.picture import picture_settings
from opensora_cli.engine.generate.plan import continuation_settings
from opensora_cli.engine.generate.prompts import OWN_KEYS, Row
from opensora_cli.engine.generate.resolve import completed, plan_here, resolve_generate_settings
from opensora_cli.engine.generate.targets import num_samples
from opensora_cli.settings.explain import Given, explain
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import GenerateRequest, given_for
from opensora_cli.settings.sampling import SamplingSettings

_DEFAULTS: Mapping[str, object] = {
    "prompt": "",
    "negative_prompt": "",
    "sampling.seed": SamplingSettings().seed,
    "condition.references": (),
}
_MOST_ROWS = 64
_MOST_EMBEDS_BYTES = 2**30
"""Of the host's memory, for prompts that are encoded before any of them is made into a video."""


Failures = list[tuple[Row, OsoraError]]


class RowReporter(SilentReporter):
    """Passes on warnings with the row that they are about; stages and notes of single rows are too many to show."""

    def __init__(self, reporter: Reporter) -> None:
        self.shown = reporter
        """Which gets what is passed on."""
        self._noted: set[str] = set()
        self.row = 0

    def note(self, text: str) -> None:
        """Show a line once, if it is of the machine and not of the row."""
        kind = text.partition(":")[0]
        if kind in ("model", "attention", "threads", "memory", "weights") and text not in self._noted:
            self._noted.add(text)
            self.shown.note(text)

    def warn(self, text: str) -> None:
        self.shown.warn(f"row {self.row}: {text}")


class Shape:
    """Rows that are planned once for each condition mode."""

    def __init__(self, template: GenerateSettings, defaults: Mapping[str, object], rows: list[Row]) -> None:
        self.rows = rows
        self.template = template
        self.device: str | None = None
        """Of one of several ranks; None: what the settings name."""
        self._defaults = defaults
        self._plans: dict[str | None, ExecutionPlan] = {}
        self._digest = _digest(template)

    @property
    def rows_together(self) -> int:
        """How many rows' prompts are encoded before the first of them is made."""
        text, model = self.template.text, self.template.model
        prompts = len(set(self.template.segment_prompts)) + self.template.picture.first
        num_bytes = 2 * prompts * text.t5_max_length * model.context_in_dim * 4
        return max(1, min(_MOST_ROWS, _MOST_EMBEDS_BYTES // num_bytes))

    def settings(self, row: Row) -> GenerateSettings:
        """Return the settings of a row; a RequestError if it breaks a rule."""
        changes = {**self._defaults, **row.own}
        if row.name is not None:
            kind = self.template.output_format
            ending = "" if row.name.lower().endswith(f".{kind}") else f".{kind}"
            changes["output.path"] = str(Path(self.template.output.path) / f"{row.name}{ending}")
        try:
            return self.template.replace(changes)
        except ValidationError as error:
            raise RequestError("; ".join(explain(error))) from error

    def plan(self, row: Row, models: LoadedModels | None, reporter: Reporter) -> ExecutionPlan:
        """Return the plan of a row, with the threads of the first; errors are those of `generate`.

        `models` are those of a run; None: it is only planned.
        """
        settings = completed(self.settings(row), reporter)
        mode = settings.condition.mode
        if mode not in self._plans:
            clips = len(self.rows) * num_samples(settings)
            self._plans[mode] = plan_here(settings, models, clips=clips, device=self.device).with_threads()
        return _of_row(self._plans[mode], settings)

    def key(self, row: Row) -> str:
        """Return the hash of what decides the results of a row, by which a manifest knows it."""
        own = {**self._defaults, **row.own}
        files = [_stamp(path) for path in _references_of(own)]
        return _sha256([self._digest, {key: str(value) for key, value in own.items()}, files, row.name])


def _of_row(plan: ExecutionPlan, settings: GenerateSettings) -> ExecutionPlan:
    """Return the plan of a row from that of another of its shape and mode."""
    settings = settings.replace({"runtime.threads": plan.settings.runtime.threads})
    asked = picture_settings(settings)
    picture = None if plan.picture is None or asked is None else _of_row(plan.picture, asked)
    smaller = draft_settings(settings, height=plan.height, width=plan.width)
    draft = None if plan.draft is None or smaller is None else _of_row(plan.draft, smaller)
    more = continuation_settings(settings)
    continuation = None if plan.continuation is None or more is None else _of_row(plan.continuation, more)
    return dataclasses.replace(plan, settings=settings, picture=picture, draft=draft, continuation=continuation)


def _digest(template: GenerateSettings) -> str:
    """Return the hash of what decides the results of all rows of a shape."""
    places = ("prompt", "negative_prompt", "files", "memory", "parallel", "runtime", "refine")
    values = {key: value for key, value in template.model_dump(mode="json").items() if key not in places}
    for name in ("path", "overwrite", "save_latents", "save_state_every", "preview_every", "explore"):
        values["output"].pop(name)
    values["sampling"].pop("seed")
    if template.sampling.batch_size == 1:
        values["sampling"].pop("batch_size")
    linear = values["precision"].pop("linear")
    picture = picture_settings(template)
    values["condition"].pop("references")
    parts = {
        **values,
        "format": template.output_format,
        "refine": [template.refine.prompt, template.refine.motion_score],
        "runtime": [template.runtime.device, template.runtime.dtype, template.runtime.attention],
        **({"linear": linear} if linear != LinearProducts.EXACT else {}),
        "fp8_storage": template.memory.fp8_storage,
        "weights": {part: stamp_of(path) for part, path in find_weights(template).paths.items()},
        "loras": [_stamp(lora.path) for lora in template.loras],
        "versions": versions(),
    }
    if picture is not None:
        parts["picture_weights"] = {part: stamp_of(path) for part, path in find_weights(picture).paths.items()}
    return _sha256(parts)


def _references_of(own: Mapping[str, object]) -> Sequence[str]:
    files = own["condition.references"]
    return files.split(";") if isinstance(files, str) else tuple(files)  # type: ignore[arg-type]  # of `OWN_KEYS`


def _stamp(path: str) -> object:
    try:
        state = os.stat(path)
    except OSError:
        return path
    return [path, state.st_size, state.st_mtime_ns]


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shapes_of(request: GenerateRequest, rows: Iterable[Row], reporter: Reporter) -> tuple[list[Shape], Failures]:
    """Return the rows by shape, and those that are refused already.

    Raises:
        RequestError: several devices are to share each video.
        CheckpointError: weights are missing.
    """
    failures: Failures = []
    members: dict[tuple[tuple[str, Given], ...], list[Row]] = {}
    for row in rows:
        if row.problem is not None:
            failures.append((row, RequestError(row.problem)))
        else:
            members.setdefault(row.shape, []).append(row)
    shapes = []
    for changes, alike in members.items():
        asked = dataclasses.replace(request, overrides={**request.overrides, **dict(changes)})
        template = _template(asked, alike, failures, reporter)
        if template is None:
            continue
        given = {key: given_for(asked, key) for key in OWN_KEYS}
        defaults = {key: _DEFAULTS[key] if at is None else at.value for key, at in given.items()}
        shapes.append(Shape(_with_whole_rows(template), defaults, alike))
    for shape in shapes:
        if shape.template.output.explore:
            raise RequestError("output.explore=true leaves no videos, and --prompts makes them: drop one of them")
        require_weights_of(shape.template)
    return shapes, failures


def _template(
    asked: GenerateRequest, rows: list[Row], failures: Failures, reporter: Reporter
) -> GenerateSettings | None:
    """Return settings with which a row can be made; rows before it are failures, and taken from `rows`."""
    while rows:
        row = rows[0]
        own = {key: Given(value, f"row {row.number}") for key, value in row.own.items()}
        try:
            return resolve_generate_settings(
                dataclasses.replace(asked, overrides={**asked.overrides, **own}), reporter=reporter
            )[0]
        except OsoraError as error:
            is_of_all = bool(failures) and failures[-1][1].message == error.message
            failures += [(each, error) for each in (rows if is_of_all else rows[:1])]
            del rows[: len(rows) if is_of_all else 1]
    return None


def _with_whole_rows(template: GenerateSettings) -> GenerateSettings:
    """Return settings under which each of several devices makes rows of its own."""
    parallel = template.parallel
    sharing = {name: degree for name, degree in parallel.degrees.items() if name != "data_parallel_degree"}
    if prod(sharing.values()) > 1 or (parallel.data_parallel_degree or parallel.world_size) != parallel.world_size:
        named = ", ".join(f"parallel.{name}={degree}" for name, degree in parallel.degrees.items())
        raise RequestError(
            f"with --prompts each of the {parallel.world_size} devices makes videos of its own, and {named} lets some "
            "share one",
            hint="drop it, or make a video that is too large for one device by a run of its own",
        )
    return template.replace({"parallel.data_parallel_degree": parallel.world_size})


def raise_if_all_are_one(failures: Failures) -> None:
    """Raise the error of all rows, if they have one and the same: then it is the request's."""
    if len({error.message for _, error in failures}) == 1:
        raise failures[0][1]
