"""`osora bench-generate`: seconds, memory and likeness of a video made with other settings."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.cli import errors, generate, options, output
from opensora_cli.cli.command import Command
from opensora_cli.core.progress import SilentReporter
from opensora_cli.settings.flags import Option

if TYPE_CHECKING:
    from opensora_cli.engine.generate.request import Resolved
    from opensora_cli.settings.layers import Layer
    from opensora_cli.settings.load import GenerateRequest

_COMPARED = "Compared settings"


def bench_generate(
    given: "Layer",
    *,
    try_: list[str] | None,
    repeats: int | None,
    plot: str | None,
    overwrite: bool,
    config: Path | None,
    set_: list[str] | None,
    from_: Path | None,
    json: bool,
    quiet: bool,
) -> None:
    """Time a video by stage, and compare it with the same video made with other settings.

    The exact run has the settings as they are given. No video is kept. A row with equal latents, evaluations and
    seconds had no effect.

    Examples:

      osora bench-generate

      osora bench-generate "raining, sea" --try euler-15 --try ab2-15 --plot a.png

      osora bench-generate --try sampling.guidance_interval=0.2,0.9
    """
    from opensora_cli.api.request import generate_request
    from opensora_cli.core.ranks import find_context
    from opensora_cli.settings.bench_generate import BenchGenerateSettings, benched_request, read_tries, refuse_unfit
    from opensora_cli.settings.explain import Given
    from opensora_cli.settings.layers import validate

    tries = read_tries(try_ or [])
    own = {"repeats": repeats, "plot": plot, "overwrite": overwrite}
    layer = {name: Given(value, f"--{name}") for name, value in own.items() if value is not None}
    settings = validate(BenchGenerateSettings, layer)
    request = benched_request(generate_request(given, assignments=set_ or [], sidecar=from_, config=config))
    context = find_context(os.environ)
    is_main = context is None or context.is_main
    reporter = output.make_reporter(quiet=quiet or not is_main)
    exact: GenerateRequest | Resolved = request
    if context is None:
        from opensora_cli.engine.generate.request import refuse_early, resolve

        exact = resolve(request, reporter=reporter)
        refuse_early(exact.settings, dry_run=False)
        refuse_unfit(exact.settings)
        for name, changes in (tries or {}).items():
            changed = {key: Given(value, f"--try {name}") for key, value in changes.items()}
            tried = replace(request, overrides={**request.overrides, **changed})
            refuse_early(resolve(tried, reporter=SilentReporter()).settings, dry_run=True)
    output.note_start(reporter)
    with errors.uninterrupted():
        from opensora_cli.engine.bench_generate.run import bench_generate as compare

    rank_flags = options.rank_words(
        {"--repeats": settings.repeats, "--try": try_, "--plot": plot, "--overwrite": overwrite}
        | {"--json": json, "--quiet": quiet}
    )
    report = compare(exact, tries, options=settings, reporter=reporter, context=context, rank_flags=rank_flags)
    if report is not None:
        output.print_result(report, as_json=json)


_SHARED = ("--config", "--set", "--from", "--res", "--num-frames", "--ref", "--steps", "--seed", "--model", "--weights")
_ROWS = {
    "PROMPT": Option("prompt", help="What the video shows."),
    "--try": Option(
        panel=_COMPARED,
        kind=list[str],
        metavar="NAME|SETTINGS",
        help="Settings that differ from the exact run: KEY=VALUE,KEY=VALUE, or a name of the standard set such as "
        "euler-15. `exact` times that run alone. Repeatable.",
        default="the standard set",
    ),
    "--repeats": Option(
        panel=_COMPARED,
        kind=int,
        metavar="N",
        help="Timed runs of each setting; the table shows mean and deviation.",
        default="1",
    ),
    "--plot": Option(
        panel=_COMPARED, kind=str, metavar="FILE", help="Write a chart of PSNR over evaluations: .png, .svg or .pdf."
    ),
    "--overwrite": Option(panel=_COMPARED, kind=bool, help="Replace an existing chart."),
    **{
        label: generate.ROWS[label]._replace(is_common=False) for label in (*_SHARED, "--device", "--gpus", "--devices")
    },
    **options.PRINTED,
}
COMMAND = Command("bench-generate", bench_generate, _ROWS, settings="generate:GenerateSettings", layered=True)
