"""`osora train`: from a recipe to trained weights."""

import os
from pathlib import Path
from typing import Annotated

import typer

from opensora_cli.cli import errors, options, output

Recipe = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file of settings, or the name of a recipe that comes with osora.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Any setting, as in loop.batch_size=4; wins over FILE. Repeatable."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in the output folder.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Begin anew although the output folder holds an earlier run.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be trained, and do nothing.")]


def train(
    config: Recipe = None,
    set_: Assignments = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a part of the video model: the autoencoder, the text encoders or the transformer.

    Examples:

      osora train --config configs/train/demo_vae.yaml

      osora train --config configs/train/demo_vae.yaml --resume

      osora train --config demo --set output=runs/mine --set loop.steps=2000
    """
    with errors.interruptible():
        from opensora_cli.settings.layers import collect_overrides
        from opensora_cli.settings.train import TrainSettings, load_train_settings

        overrides = collect_overrides(TrainSettings, {}, set_ or [])
        settings = load_train_settings(config=config, overrides=overrides, environment=os.environ)
        reporter = output.make_reporter(quiet=quiet)
        if dry_run:
            with errors.uninterrupted():
                from opensora_cli.engine.train.plan import plan_training

            output.print_result(plan_training(settings, resume=resume, overwrite=overwrite), as_json=json_)
        else:
            with errors.uninterrupted():
                from opensora_cli.engine.train import run

            result = run.train(settings, resume=resume, overwrite=overwrite, reporter=reporter)
            output.print_result(result, as_json=json_)
