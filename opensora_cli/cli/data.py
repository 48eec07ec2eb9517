"""`osora data`: make tables of pictures and videos, split them, preview them and encode them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.cli import errors, options, output, train
from opensora_cli.cli.command import Command, group
from opensora_cli.core.files import require_there
from opensora_cli.settings.flags import Option

if TYPE_CHECKING:
    from opensora_cli.settings.data import PreviewSettings, ScanSettings, ShardSettings
    from opensora_cli.settings.layers import Layer

_TABLE = Option("table")


def scan(settings: "ScanSettings", *, json: bool, quiet: bool) -> None:
    """Make the table that training reads, of a folder and all folders in it.

    The caption of clip.mp4 is in clip.txt, or in clip.json under text, caption or prompt. A second scan reads only new,
    changed and broken files. Broken files are listed and skipped, and the exit code is 5.

    Examples:

      osora data scan clips

      osora data scan clips --deep

      osora data scan clips -o clips.parquet --workers 16
    """
    require_there(settings.folder)
    with errors.uninterrupted():
        from opensora_cli.engine.data import scan as engine

    result = engine.scan(settings, reporter=output.make_reporter(quiet=quiet))
    output.print_result(result, as_json=json)
    result.require_whole()


def shard(settings: "ShardSettings", *, json: bool, quiet: bool) -> None:
    """Split a table into parts of equally many rows, beside it.

    Examples:

      osora data shard clips.csv --parts 8
    """
    require_there(settings.table)
    with errors.uninterrupted():
        from opensora_cli.engine.data import scan as engine

    output.print_result(engine.shard(settings), as_json=json)


def preview(settings: "PreviewSettings", *, config: Path | None, json: bool, quiet: bool) -> None:
    """Make a contact sheet of a table: frames, captions, sizes and buckets.

    Examples:

      osora data preview clips.csv -o sheet.png
    """
    from opensora_cli.settings.data import DataSettings
    from opensora_cli.settings.explain import Given
    from opensora_cli.settings.train import load_train_settings

    require_there(settings.table)
    with errors.uninterrupted():
        from opensora_cli.engine.data import preview as engine
        from opensora_cli.engine.encode.datasets import pixel_multiple

    reporter = output.make_reporter(quiet=quiet)
    data, multiple = DataSettings(), 16
    if config is not None:
        training = load_train_settings(
            config=config,
            # Files of the reference name no table, and are refused without one.
            overrides={"data.table": Given(settings.table, "TABLE")} if config.suffix == ".py" else {},
            environment=os.environ,
            report=reporter.note,
        )
        data, multiple = training.data, pixel_multiple(training)
    result = engine.preview(settings, data, multiple=multiple, reporter=reporter)
    output.print_result(result, as_json=json)
    result.require_whole()


def cache(given: "Layer", *, config: Path | None, set_: list[str] | None, json: bool, quiet: bool) -> None:
    """Precompute latents and text embeddings of all clips that a training of the transformer needs.

    Training with the same recipe then reads them (train_mmdit.cache), and loads neither the autoencoder nor the text
    encoders. Training also makes the cache by itself; entries whose files did not change are kept. A cache belongs to
    its autoencoder, text encoders and settings: others are refused.

    Examples:

      osora data cache --config demo_short

      osora data cache --config stage1 --table clips.csv -o clips_cache
    """
    from opensora_cli.engine.data.early import refuse_early
    from opensora_cli.settings.layers import collect_overrides
    from opensora_cli.settings.train import TrainSettings, load_train_settings

    overrides = collect_overrides(TrainSettings, given, set_ or [])
    reporter = output.make_reporter(quiet=quiet)
    settings = load_train_settings(config=config, overrides=overrides, environment=os.environ, report=reporter.note)
    refuse_early(settings)
    with errors.uninterrupted():
        from opensora_cli.engine.data.cache import cache_clips

    result = cache_clips(settings, reporter=reporter)
    output.print_result(result, as_json=json)
    result.require_whole()


_SCAN_ROWS = {
    "DIR": Option("folder"),
    "--out": Option("table", help="CSV or parquet file to write.", metavar="TABLE", default="DIR.csv", short="-o"),
    "--workers": Option("workers", help="Files to read at a time.", default="cores"),
    "--deep": Option("deep"),
    "--overwrite": Option("overwrite"),
    **options.PRINTED,
}
_SHARD_ROWS = {"TABLE": _TABLE, "--parts": Option("parts"), "--overwrite": Option("overwrite"), **options.PRINTED}
_PREVIEW_ROWS = {
    "TABLE": _TABLE,
    "--out": Option("sheet", help="Picture to write: .png, .jpg or .webp.", metavar="FILE", short="-o"),
    "--config": options.config_row("Recipe of osora train whose buckets to show.", "train"),
    "--count": Option("count"),
    "--seed": Option("seed", kind=int),
    "--overwrite": Option("overwrite"),
    **options.PRINTED,
}
_CACHE_ROWS = {
    "--config": train.ROWS["--config"],
    "--table": Option("data.table", help="Table of clips, in place of the recipe's data.", metavar="FILE"),
    "--out": Option("train_mmdit.cache", help="Cache, in place of the recipe's.", metavar="FOLDER", short="-o"),
    "--set": train.ROWS["--set"],
    **options.device_rows(),
    **options.PRINTED,
}

COMMAND = group(
    "data",
    "Make tables of pictures and videos, split them, preview them and encode them.",
    Command("scan", scan, _SCAN_ROWS, settings="data:ScanSettings"),
    Command("shard", shard, _SHARD_ROWS, settings="data:ShardSettings"),
    Command("preview", preview, _PREVIEW_ROWS, settings="data:PreviewSettings"),
    Command("cache", cache, _CACHE_ROWS, settings="train:TrainSettings", layered=True),
)
