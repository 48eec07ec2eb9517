"""`osora bench-generate`: seconds, memory and likeness of a video made with other settings."""

import os
from dataclasses import replace
from typing import Annotated

import typer

from opensora_cli.cli import errors, options, output

_COMPARED = "What is compared"

Tries = Annotated[
    list[str] | None,
    typer.Option(
        "--try",
        metavar="NAME|SETTINGS",
        help="Settings that differ from the exact run: KEY=VALUE,KEY=VALUE, or a name of the standard set such as "
        "euler-15. `exact` times that run alone. Repeatable. Default: the standard set.",
        rich_help_panel=_COMPARED,
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        metavar="N",
        help="Timed runs of each setting; the table shows mean and deviation. Default: 1.",
        rich_help_panel=_COMPARED,
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Write a chart of PSNR over evaluations: .png, .svg or .pdf.",
        rich_help_panel=_COMPARED,
    ),
]


def bench_generate(
    prompt: options.Prompt = None,
    try_: Tries = None,
    repeats: Repeats = None,
    plot: Plot = None,
    overwrite: options.Overwrite = False,
    res: options.Resolution = None,
    num_frames: options.NumFrames = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    ref: options.References = None,
    model: options.Model = None,
    weights: options.Weights = None,
    device: options.Device = None,
    gpus: options.Gpus = None,
    devices: options.Devices = None,
    config: options.Config = None,
    set_: options.Assignments = None,
    from_: options.FromSidecar = None,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time a video by stage, and compare it with the same video made with other settings.

    The exact run has the settings as they are given. No video is kept. A row with equal latents, evaluations and
    seconds had no effect.

    Examples:

      osora bench-generate

      osora bench-generate "raining, sea" --try euler-15 --try ab2-15 --plot a.png

      osora bench-generate --try sampling.guidance_interval=0.2,0.9
    """
    typed = locals()
    with errors.interruptible():
        from opensora_cli.api.request import generate_request
        from opensora_cli.core.ranks import find_context
        from opensora_cli.settings.bench_generate import (
            BenchGenerateSettings,
            benched_request,
            read_tries,
            refuse_unfit,
        )
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.flags import FLAGS, given_flags, option_of
        from opensora_cli.settings.layers import validate

        tries = read_tries(try_ or [])
        typed_options = {"repeats": repeats, "plot": plot, "overwrite": overwrite}
        given = {name: Given(value, f"--{name}") for name, value in typed_options.items() if value is not None}
        settings = validate(BenchGenerateSettings, given)
        named = {} if prompt is None else {"prompt": Given(prompt, "PROMPT")}
        flags = given_flags({name: typed[name] for name in FLAGS if name in typed}, called=option_of)
        request = benched_request(generate_request(named | flags, assignments=set_ or [], sidecar=from_, config=config))
        context = find_context(os.environ)
        is_main = context is None or context.is_main
        reporter = output.make_reporter(quiet=quiet or not is_main)
        if context is None:
            from opensora_cli.engine.generate.request import refuse_early, settings_early

            refuse_early(request, dry_run=False, reporter=reporter)
            exact = settings_early(request, [])
            if exact is not None:
                refuse_unfit(exact)
            for name, changes in (tries or {}).items():
                changed = {key: Given(value, f"--try {name}") for key, value in changes.items()}
                tried = replace(request, overrides={**request.overrides, **changed})
                refuse_early(tried, dry_run=True, reporter=reporter)
        output.note_start(reporter)
        with errors.uninterrupted():
            from opensora_cli.engine.bench_generate.run import bench_generate as compare

        rank_flags = [f"--repeats={settings.repeats}", *(f"--try={text}" for text in try_ or [])]
        rank_flags += [] if plot is None else [f"--plot={plot}"]
        switches = {"--overwrite": overwrite, "--json": json_, "--quiet": quiet}
        rank_flags += [flag for flag, is_on in switches.items() if is_on]
        report = compare(request, tries, options=settings, reporter=reporter, context=context, rank_flags=rank_flags)
        if report is not None:
            output.print_result(report, as_json=json_)
