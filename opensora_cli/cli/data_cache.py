"""`osora data cache`: encode the clips of a training once and for all."""

import os
from pathlib import Path
from typing import Annotated

import typer

from opensora_cli.cli import errors, options, output, train

Table = Annotated[
    Path | None, typer.Option("--table", metavar="FILE", help="Table of clips, in place of the recipe's data.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="The cache, in place of the recipe's.")]


def cache(
    config: train.Recipe = None,
    table: Table = None,
    out: Out = None,
    set_: train.Assignments = None,
    device: options.Device = None,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Precompute latents and text embeddings of all clips that a training of the transformer asks for.

    Training with the same recipe then reads them (train_mmdit.cache), and loads neither the autoencoder nor the text
    encoders. It would make the cache by itself, too; what is there is not made again, unless its file was replaced. A
    cache belongs to its autoencoder, text encoders and settings: others are refused.

    Examples:

      osora data cache --config demo

      osora data cache --config stage1 --table clips.csv -o clips_cache
    """
    flags = {
        "data.table": ("--table", table),
        "train_mmdit.cache": ("--out", out),
        "device": ("--device", device),
    }
    with errors.interruptible():
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.layers import collect_overrides
        from opensora_cli.settings.train import TrainSettings, load_train_settings

        given = {key: Given(str(value), flag) for key, (flag, value) in flags.items() if value is not None}
        overrides = collect_overrides(TrainSettings, given, set_ or [])
        reporter = output.make_reporter(quiet=quiet)
        settings = load_train_settings(config=config, overrides=overrides, environment=os.environ, tell=reporter.note)
        with errors.uninterrupted():
            from opensora_cli.engine.data.cache import cache_clips

        result = cache_clips(settings, reporter=reporter)
        output.print_result(result, as_json=json_)
        result.require_whole()
