"""`osora data`: make tables of pictures and videos, split them, preview them and encode them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from opensora_cli.cli import errors, options, output, train
from opensora_cli.cli.command import Command, Group
from opensora_cli.core.files import require_there

if TYPE_CHECKING:
    from opensora_cli.settings.base import Section

SectionT = TypeVar("SectionT", bound="Section")

app = typer.Typer(cls=Group, help="Make tables of pictures and videos, split them, preview them and encode them.")

Folder = Annotated[str, typer.Argument(metavar="DIR", help="Folder of pictures and videos.", show_default=False)]
Table = Annotated[str, typer.Argument(metavar="TABLE", help="CSV or parquet table.", show_default=False)]
RecipeTable = Annotated[
    Path | None, typer.Option("--table", metavar="FILE", help="Table of clips, in place of the recipe's data.")
]
CacheFolder = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="The cache, in place of the recipe's.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]


def scan(
    folder: Folder,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="TABLE", help="CSV or parquet file to write. Default: DIR.csv"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", help="Files that are read at a time. Default: cores.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Decode every frame, to find damage in the middle of files. Slower.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Read every file again, and replace a table of another origin.")
    ] = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Make the table that training reads, of a folder and all folders in it.

    The caption of clip.mp4 is in clip.txt, or in clip.json under text, caption or prompt. A second scan reads only new,
    changed and broken files. Broken ones are listed, and left out: the exit code is 5 then.

    Examples:

      osora data scan clips

      osora data scan clips --deep

      osora data scan clips -o clips.parquet --workers 16
    """
    with errors.interruptible():
        from opensora_cli.settings.data import ScanSettings

        settings = _validated(
            ScanSettings,
            {
                "folder": ("DIR", folder),
                "table": ("--out", out),
                "workers": ("--workers", workers),
                "deep": ("--deep", deep),
                "overwrite": ("--overwrite", overwrite),
            },
        )
        require_there(settings.folder)
        with errors.uninterrupted():
            from opensora_cli.engine.data import scan as engine

        result = engine.scan(settings, reporter=output.make_reporter(quiet=quiet))
        output.print_result(result, as_json=json_)
        result.require_whole()


def shard(
    table: Table,
    parts: Annotated[int, typer.Option("--parts", metavar="N", help="How many files.")],
    overwrite: Overwrite = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Split a table into parts of equally many rows, beside it.

    Examples:

      osora data shard clips.csv --parts 8
    """
    with errors.interruptible():
        from opensora_cli.settings.data import ShardSettings

        settings = _validated(
            ShardSettings,
            {"table": ("TABLE", table), "parts": ("--parts", parts), "overwrite": ("--overwrite", overwrite)},
        )
        require_there(settings.table)
        with errors.uninterrupted():
            from opensora_cli.engine.data import scan as engine

        output.print_result(engine.shard(settings), as_json=json_)


def preview(
    table: Table,
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Picture to write: .png, .jpg or .webp.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="NAME|FILE",
            help="Settings or recipe of osora train whose buckets are shown. Default: usual ones.",
            autocompletion=options.completed_settings("train"),
        ),
    ] = None,
    count: Annotated[int | None, typer.Option("--count", metavar="N", help="Samples to show. Default: 24.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of their choice. Default: 0.")] = None,
    overwrite: Overwrite = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Make a contact sheet of a table: frames, captions, sizes and buckets.

    Examples:

      osora data preview clips.csv -o sheet.png
    """
    with errors.interruptible():
        from opensora_cli.settings.data import PreviewSettings

        settings = _validated(
            PreviewSettings,
            {
                "table": ("TABLE", table),
                "sheet": ("--out", out),
                "count": ("--count", count),
                "seed": ("--seed", seed),
                "overwrite": ("--overwrite", overwrite),
            },
        )
        require_there(settings.table)
        with errors.uninterrupted():
            from opensora_cli.engine.data import preview as engine
            from opensora_cli.engine.encode.loading import pixel_multiple
        from opensora_cli.settings.data import DataSettings
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.train import load_train_settings

        reporter = output.make_reporter(quiet=quiet)
        data, multiple = DataSettings(), 16
        if config is not None:
            training = load_train_settings(
                config=config,
                # Files of the reference name none, and are refused without.
                overrides={"data.table": Given(settings.table, "TABLE")} if config.suffix == ".py" else {},
                environment=os.environ,
                report=reporter.note,
            )
            data, multiple = training.data, pixel_multiple(training)
        result = engine.preview(settings, data, multiple=multiple, reporter=reporter)
        output.print_result(result, as_json=json_)
        result.require_whole()


def cache(
    config: train.Recipe = None,
    table: RecipeTable = None,
    out: CacheFolder = None,
    set_: train.Assignments = None,
    device: options.Device = None,
    threads: options.Threads = None,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Precompute latents and text embeddings of all clips that a training of the transformer asks for.

    Training with the same recipe then reads them (train_mmdit.cache), and loads neither the autoencoder nor the text
    encoders. It would make the cache by itself, too; what is there is not made again, unless its file was replaced. A
    cache belongs to its autoencoder, text encoders and settings: others are refused.

    Examples:

      osora data cache --config demo_short

      osora data cache --config stage1 --table clips.csv -o clips_cache
    """
    flags = {
        "data.table": ("--table", table),
        "train_mmdit.cache": ("--out", out),
        "device": ("--device", device),
        "threads": ("--threads", threads),
    }
    with errors.interruptible():
        from opensora_cli.engine.data.early import refuse_early
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.layers import collect_overrides
        from opensora_cli.settings.train import TrainSettings, load_train_settings

        given = {key: Given(str(value), flag) for key, (flag, value) in flags.items() if value is not None}
        overrides = collect_overrides(TrainSettings, given, set_ or [])
        reporter = output.make_reporter(quiet=quiet)
        settings = load_train_settings(config=config, overrides=overrides, environment=os.environ, report=reporter.note)
        refuse_early(settings)
        with errors.uninterrupted():
            from opensora_cli.engine.data.cache import cache_clips

        result = cache_clips(settings, reporter=reporter)
        output.print_result(result, as_json=json_)
        result.require_whole()


def _validated(schema: type[SectionT], given: dict[str, tuple[str, object]]) -> SectionT:
    from opensora_cli.settings.explain import Given
    from opensora_cli.settings.layers import validate

    return validate(schema, {key: Given(value, flag) for key, (flag, value) in given.items() if value is not None})


app.command("scan", cls=Command)(scan)
app.command("shard", cls=Command)(shard)
app.command("preview", cls=Command)(preview)
app.command("cache", cls=Command)(cache)


@app.callback(invoke_without_command=True)
def _data(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
