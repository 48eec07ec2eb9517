"""`osora ckpt`: convert, inspect, verify, merge and download weights."""

from pathlib import Path

from opensora_cli.checkpoint.files import check_target
from opensora_cli.cli.app import make_group
from opensora_cli.cli.command import Call, make_command
from opensora_cli.core.reading import require_there
from opensora_cli.settings.flags import OUTPUT, Option
from opensora_cli.settings.tools import (
    ConvertSettings,
    DownloadSettings,
    InspectSettings,
    MergeLoraSettings,
    VerifySettings,
    WriteSettings,
)

_WRITTEN = {
    "--no-hash": Option(kind=bool, help="No effect: weights are not hashed. Older scripts give it."),
    "--format": Option("format", OUTPUT),
    "--shard-size": Option("shard_size", OUTPUT, metavar="SIZE"),
    "--overwrite": Option("overwrite", OUTPUT),
}


def convert(settings: ConvertSettings, call: Call) -> None:
    """Convert weights from any format to any other, in little memory.

    Formats are found by content: safetensors files and shards, torch files and shards, ColossalAI and
    torch.distributed.checkpoint folders, and the checkpoints of osora train.

    Examples:
      osora ckpt convert runs/demo transformer.safetensors --select ema
      osora ckpt convert flux1-dev.safetensors flux-split --qkv split
      osora ckpt convert fp32.safetensors bf16.safetensors --dtype bf16
    """
    _refuse_early(settings, settings.source)
    with call.loading():
        from opensora_cli.engine.ckpt import convert as engine

    call.show(engine.convert(settings, dry_run="--dry-run" in call.given, reporter=call.reporter))


def inspect(settings: InspectSettings, call: Call) -> None:
    """Print a summary of a checkpoint: format, names, sizes, dtypes, metadata and the model.

    Examples:
      osora ckpt inspect ckpts/Open_Sora_v2.safetensors
      osora ckpt inspect ckpts/Open_Sora_v2.safetensors --all
      osora ckpt inspect runs/demo --select ema
    """
    require_there(settings.path)
    with call.loading():
        from opensora_cli.engine.ckpt import inspect as engine

    call.show(engine.inspect(settings))


def verify(settings: VerifySettings, call: Call) -> None:
    """Check that weights are complete and finite; exit with 3 if they are not.

    Examples:
      osora ckpt verify ckpts/Open_Sora_v2.safetensors --preset open-sora-v2
    """
    require_there(settings.path)
    with call.loading():
        from opensora_cli.engine.ckpt import verify as engine

    call.show(engine.verify(settings, reporter=call.reporter))


def merge_lora(settings: MergeLoraSettings, call: Call) -> None:
    """Merge a LoRA adapter into the weights that it was trained for.

    Examples:
      osora ckpt merge-lora Open_Sora_v2.safetensors my-adapter merged.safetensors
      osora ckpt merge-lora merged.safetensors lora base.safetensors --scale -1
    """
    _refuse_early(settings, settings.base, settings.adapter)
    with call.loading():
        from opensora_cli.engine.ckpt import convert as engine

    call.show(engine.merge_lora(settings, reporter=call.reporter))


def download(settings: DownloadSettings, call: Call) -> None:
    """Download a released model from the Hugging Face Hub, and verify it.

    An interrupted download continues where it stopped. HF_ENDPOINT and HF_TOKEN are respected.

    Examples:
      osora ckpt download open-sora-v2 --dry-run
      osora ckpt download open-sora-v2
    """
    with call.loading():
        from opensora_cli.engine.ckpt import download as engine

    if "--dry-run" in call.given:
        call.show(engine.plan_download(settings))
    else:
        call.show(engine.download(settings, reporter=call.reporter))


def _refuse_early(settings: WriteSettings, *sources: str) -> None:
    """Refuse wrong paths before torch is imported. The size of the weights is checked later."""
    require_there(*sources)
    target, paths = Path(settings.target), map(Path, sources)
    check_target(target, format=settings.resolved_format, overwrite=settings.overwrite, sources=paths)


_CONVERT_ROWS = {
    "SRC": Option("source"),
    "DST": Option("target"),
    "--dry-run": Option(kind=bool, help="Check everything, print what would be done, and do nothing."),
    "--drop": Option("drop", metavar="PATTERN"),
    "--rename": Option("rename", metavar="OLD=NEW"),
    **_WRITTEN,
}
_MERGE_ROWS = {"BASE": Option("base"), "ADAPTER": Option("adapter"), "OUT": Option("target"), **_WRITTEN}
_DOWNLOAD_ROWS = {
    "PRESET": Option("preset"),
    "--to": Option("to", metavar="DIR"),
    "--dry-run": Option(kind=bool, help="Print files, sizes and licenses, and download nothing."),
}

COMMAND = make_group(
    "ckpt",
    "Convert, inspect, verify, merge and download weights.",
    make_command(convert, _CONVERT_ROWS),
    make_command(inspect, {"PATH": Option("path")}),
    make_command(verify, {"PATH": Option("path"), "--preset": Option("preset", metavar="NAME")}),
    make_command(merge_lora, _MERGE_ROWS),
    make_command(download, _DOWNLOAD_ROWS),
)
CONVERT = make_command(
    convert, _CONVERT_ROWS, name="convert-ckpt", about="Convert weights, as osora ckpt convert does."
)
