"""`osora bench-generate`: what settings gain, and what they change."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from opensora_cli.cli import errors, options, output

if TYPE_CHECKING:
    from opensora_cli.engine.bench_generate.report import BenchGenerateReport

_OUTPUT = "Output"
_COMPARED = "What is compared"

Tries = Annotated[
    list[str] | None,
    typer.Option(
        "--try",
        metavar="NAME|SETTINGS",
        help="What differs from the exact run: KEY=VALUE,KEY=VALUE, or a name of the standard set, as in euler-15. "
        "Repeatable. Default: the standard set.",
        rich_help_panel=_COMPARED,
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        metavar="N",
        help="Runs of each setting, back and forth; the median counts. Default: 1.",
        rich_help_panel=_COMPARED,
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Write a chart of quality over evaluations: .png, .svg or .pdf.",
        rich_help_panel=_OUTPUT,
    ),
]


def bench_generate(
    prompt: options.Prompt = None,
    try_: Tries = None,
    repeats: Repeats = None,
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
    plot: Plot = None,
    overwrite: options.Overwrite = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Make the same video with other settings, and show what each gains, and how far it is from the exact run.

    The exact run is that of the settings as they are given. No video is kept. A setting that changed nothing is
    reported as without effect.

    Examples:

      osora bench-generate

      osora bench-generate "raining, sea" --try euler-15 --try ab2-15 --plot a.png

      osora bench-generate --try sampling.guidance_interval=0.2,0.9 --json
    """
    typed = locals()
    with errors.interruptible():
        from opensora_cli.api.request import generate_request
        from opensora_cli.core.ranks import find_context
        from opensora_cli.settings.bench_generate import BenchGenerateSettings, benched_request, read_tries
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.flags import FLAGS, given_flags, option_of
        from opensora_cli.settings.layers import validate

        tries = read_tries(try_ or [])
        given = {
            "repeats": Given(repeats, "--repeats"),
            "plot": Given(plot, "--plot"),
            "overwrite": Given(overwrite, "--overwrite"),
        }
        settings = validate(BenchGenerateSettings, {key: at for key, at in given.items() if at.value is not None})
        # --overwrite is of the chart.
        flags = {name: typed[name] for name in FLAGS if name in typed and name != "overwrite"}
        named = {} if prompt is None else {"prompt": Given(prompt, "PROMPT")}
        request = benched_request(
            generate_request(
                named | given_flags(flags, called=option_of), assignments=set_ or [], sidecar=from_, config=config
            )
        )
        context = find_context(os.environ)
        is_main = context is None or context.is_main
        reporter = output.make_reporter(quiet=quiet or not is_main)
        if context is None:
            from opensora_cli.engine.bench_generate.early import refuse_early

            refuse_early(request, tries, reporter=reporter)
        output.note_start(reporter)
        with errors.uninterrupted():
            from opensora_cli.engine.bench_generate.run import bench_from_request

        def publish(report: "BenchGenerateReport") -> None:
            output.print_result(report, as_json=json_)

        valued = {"--repeats": repeats, "--plot": plot}
        switched = {"--overwrite": overwrite, "--json": json_, "--quiet": quiet}
        bench_from_request(
            request,
            tries,
            settings,
            reporter=reporter,
            context=context,
            rank_flags=[
                *(f"--try={name}" for name in tries),
                *(f"{flag}={value}" for flag, value in valued.items() if value is not None),
                *(flag for flag, is_on in switched.items() if is_on),
            ],
            publish=publish,
        )
