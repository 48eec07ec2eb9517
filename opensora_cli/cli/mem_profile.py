"""`osora mem-profile`: where the memory goes."""

import os
from pathlib import Path
from typing import Annotated

import typer

from opensora_cli.cli import errors, options, output

_FILES = "Files"

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="NAME|FILE",
        help="Recipe, preset, YAML file of settings, or .py configuration of the reference. One of training profiles "
        "training. Default: the demo, generating.",
        autocompletion=options.completed_settings("train", "generate"),
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting of what is profiled. Repeatable."),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus", metavar="N", help="Predict for each of so many devices, which need not be there; nothing is measured."
    ),
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Measure techniques that save memory, one by one, and kinds of attention.")
]
Runs = Annotated[
    int | None,
    typer.Option(
        "--runs",
        metavar="N",
        help="Runs that are timed after the measured one, by stage and block. Default: 3; 0: none.",
    ),
]
AdaptiveBatch = Annotated[bool, typer.Option("--adaptive-batch", help="Find the largest batch that fits.")]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Free memory that the batch may use, as in 24GiB. Default: all.",
    ),
]
Snapshot = Annotated[
    str | None,
    typer.Option(
        "--snapshot", metavar="FILE", help="Write a file for PyTorch's memory viewer.", rich_help_panel=_FILES
    ),
]
Plot = Annotated[
    str | None,
    typer.Option("--plot", metavar="FILE", help="Write charts: .png, .svg or .pdf.", rich_help_panel=_FILES),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.", rich_help_panel=_FILES)]


def mem_profile(
    config: Config = None,
    set_: Assignments = None,
    device: options.Device = None,
    gpus: Gpus = None,
    compare: Compare = False,
    runs: Runs = None,
    adaptive_batch: AdaptiveBatch = False,
    memory_limit: MemoryLimit = None,
    snapshot: Snapshot = None,
    plot: Plot = None,
    overwrite: Overwrite = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show where the memory of a generation or a training goes, predicted and measured.

    Needs no weights: random ones of the same sizes take the same memory. What does not fit here is only predicted.

    Examples:

      osora mem-profile

      osora mem-profile --config demo_vae --compare --plot memory.png

      osora mem-profile --config 768px --json

      osora mem-profile --config stage1 --gpus 8
    """
    with errors.interruptible():
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.layers import validate
        from opensora_cli.settings.tools import MemProfileSettings, profiled_settings

        given = {
            "compare": Given(compare, "--compare"),
            "runs": Given(runs, "--runs"),
            "adaptive_batch": Given(adaptive_batch, "--adaptive-batch"),
            "memory_limit": Given(memory_limit, "--memory-limit"),
            "snapshot": Given(snapshot, "--snapshot"),
            "plot": Given(plot, "--plot"),
            "overwrite": Given(overwrite, "--overwrite"),
        }
        settings = validate(MemProfileSettings, {key: at for key, at in given.items() if at.value is not None})
        what = profiled_settings(config, assignments=set_ or [], device=device, gpus=gpus, environment=os.environ)
        with errors.uninterrupted():
            from opensora_cli.engine.mem_profile.profile import mem_profile as profile

        result = profile(what, settings, reporter=output.make_reporter(quiet=quiet))
        output.print_result(result, as_json=json_)
