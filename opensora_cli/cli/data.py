"""`osora data`: make tables of pictures and videos, split them, preview them and encode them."""

from opensora_cli.cli import train
from opensora_cli.cli.app import make_group
from opensora_cli.cli.command import CONFIG, SET, Call, device_rows, make_command
from opensora_cli.core.reading import require_there
from opensora_cli.engine.encode.inputs import require_cache_inputs
from opensora_cli.settings.flags import Option
from opensora_cli.settings.layers import Layer
from opensora_cli.settings.tools import PreviewSettings, ScanSettings, ShardSettings
from opensora_cli.settings.train import TrainSettings


def scan(settings: ScanSettings, call: Call) -> None:
    """Make the table that training reads, of a folder and all folders in it.

    The caption of clip.mp4 is in clip.txt, or in clip.json under text, caption or prompt. Broken files are listed and
    skipped, and the exit code is 5.

    Examples:
      osora data scan clips
      osora data scan clips -o clips.parquet --workers 16
    """
    require_there(settings.folder)
    with call.loading():
        from opensora_cli.engine.data import scan as engine

    call.show(engine.scan(settings, reporter=call.reporter))


def shard(settings: ShardSettings, call: Call) -> None:
    """Split a table into parts of equally many rows, beside it.

    Examples:
      osora data shard clips.csv --parts 8
    """
    require_there(settings.table)
    with call.loading():
        from opensora_cli.engine.data import scan as engine

    call.show(engine.shard(settings))


def preview(settings: PreviewSettings, call: Call) -> None:
    """Make a contact sheet of a table: frames, captions and sizes.

    Examples:
      osora data preview clips.csv -o sheet.png
    """
    require_there(settings.table)
    with call.loading():
        from opensora_cli.engine.data import scan as engine

    call.show(engine.preview(settings, reporter=call.reporter))


def cache(given: Layer, call: Call) -> None:
    """Precompute latents and text embeddings of all clips that a training of the transformer needs.

    Training with the same recipe then reads them (train_mmdit.cache), and loads neither the autoencoder nor the text
    encoders. Training also makes the cache by itself; entries whose files did not change are kept. A cache belongs to
    its autoencoder, text encoders and settings: others are refused.

    Examples:
      osora data cache --config demo_lora
      osora data cache --config stage1 --table clips.csv -o clips_cache
    """
    settings = train.load_settings(given, call)
    require_cache_inputs(settings)
    with call.loading():
        from opensora_cli.engine.encode.clip_cache import cache_clips

    call.show(cache_clips(settings, reporter=call.reporter))


_SCAN_ROWS = {"DIR": Option("folder"), "--out": Option("table", metavar="TABLE", short="-o")}
_PREVIEW_ROWS = {"TABLE": Option("table"), "--out": Option("sheet", metavar="FILE", short="-o")}
_CACHE_ROWS = {
    "--config": CONFIG._replace(help=train.CONFIG_HELP),
    "--table": Option("data.table", help="Table of clips, in place of the recipe's data.", metavar="FILE"),
    "--out": Option("train_mmdit.cache", help="Cache, in place of the recipe's.", metavar="FOLDER", short="-o"),
    "--set": SET._replace(help=train.SET_HELP),
    **device_rows(),
}
COMMAND = make_group(
    "data",
    "Make tables of pictures and videos, split them, preview them and encode them.",
    make_command(scan, _SCAN_ROWS),
    make_command(shard, {"TABLE": Option("table")}),
    make_command(preview, _PREVIEW_ROWS),
    make_command(cache, _CACHE_ROWS, settings=TrainSettings),
)
