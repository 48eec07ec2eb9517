"""`osora ckpt`: convert, inspect, verify, compare, merge and download weights."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from opensora_cli.cli import errors, options, output
from opensora_cli.cli.command import Command, Group
from opensora_cli.core.files import require_there
from opensora_cli.settings.enums import QKVLayout, RotaryLayout, TargetFormat, WeightDType, WeightSelection

if TYPE_CHECKING:
    from opensora_cli.settings.base import Section

SectionT = TypeVar("SectionT", bound="Section")

app = typer.Typer(cls=Group, help="Convert, inspect, verify, compare, merge and download weights.")

_WEIGHTS = "Weights"
_TARGET = "Output"

Source = Annotated[str, typer.Argument(metavar="SRC", help="File or folder to read.", show_default=False)]
Target = Annotated[str, typer.Argument(metavar="DST", help="File or folder to write.", show_default=False)]
PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="File or folder.", show_default=False)]

Select = Annotated[
    WeightSelection | None,
    typer.Option("--select", help="Which weights of a training. Default: model.", rich_help_panel=_WEIGHTS),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Only tensors whose names match, as in 'double_blocks.*'. Repeatable.",
        rich_help_panel=_WEIGHTS,
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        "--drop", metavar="PATTERN", help="No tensors whose names in SRC match. Repeatable.", rich_help_panel=_WEIGHTS
    ),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="Replace the start of names; re:PATTERN=NEW what a regular expression finds. Repeatable.",
        rich_help_panel=_WEIGHTS,
    ),
]
QKV = Annotated[
    QKVLayout | None,
    typer.Option("--qkv", help="q, k and v in one tensor, or in three.", rich_help_panel=_WEIGHTS),
]
Rotary = Annotated[
    RotaryLayout | None,
    typer.Option("--rotary", help="Order of rotary pairs in a head.", rich_help_panel=_WEIGHTS),
]
DType = Annotated[
    WeightDType | None,
    typer.Option("--dtype", help="Of all floating point weights.", rich_help_panel=_WEIGHTS),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Released model whose names and shapes it must have, as in open-sora-v2.",
        rich_help_panel=_WEIGHTS,
    ),
]
Format = Annotated[
    TargetFormat | None,
    typer.Option(
        "--format",
        help="What to write. Default: by the ending of DST, else a folder of safetensors shards.",
        rich_help_panel=_TARGET,
    ),
]
ShardSize = Annotated[
    str | None,
    typer.Option("--shard-size", metavar="SIZE", help="As in 4GB. Default: 4096MiB.", rich_help_panel=_TARGET),
]
NoHash = Annotated[
    bool,
    typer.Option("--no-hash", help="Do not record hashes of SRC and of shards: faster.", rich_help_panel=_TARGET),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST.", rich_help_panel=_TARGET)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print what would be done, and do nothing.")]


def convert(
    source: Source,
    target: Target,
    select: Select = None,
    only: Only = None,
    drop: Drop = None,
    rename: Rename = None,
    qkv: QKV = None,
    rotary: Rotary = None,
    dtype: DType = None,
    preset: Preset = None,
    format_: Format = None,
    shard_size: ShardSize = None,
    no_hash: NoHash = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Convert weights from any format to any other, in little memory.

    Formats are found by content: safetensors files and shards, torch files and shards, ColossalAI and
    torch.distributed.checkpoint folders, and the checkpoints of osora train.

    Examples:

      osora ckpt convert runs/demo transformer.safetensors --select ema

      osora ckpt convert flux1-dev.safetensors flux-split --qkv split --rotary half

      osora ckpt convert large.safetensors small.safetensors --dtype fp8_e4m3
    """
    with errors.interruptible():
        from opensora_cli.engine.ckpt.early import refuse_early
        from opensora_cli.settings.ckpt import ConvertSettings

        settings = _validated(
            ConvertSettings,
            {"source": ("SRC", source), "target": ("DST", target), "hashing": ("--no-hash", not no_hash)},
            {"select": select, "only": only, "drop": drop, "rename": rename, "qkv": qkv, "rotary": rotary}
            | {"dtype": dtype, "preset": preset, "format": format_, "shard_size": shard_size, "overwrite": overwrite},
        )
        refuse_early([settings.source], settings)
        with errors.uninterrupted():
            from opensora_cli.engine.ckpt import convert as engine

        if dry_run:
            output.print_result(engine.plan_convert(settings), as_json=json_)
        else:
            reporter = output.make_reporter(quiet=quiet)
            output.print_result(engine.convert(settings, reporter=reporter), as_json=json_)


def inspect(
    path: PathArgument,
    only: Only = None,
    select: Select = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the data, too: ranges, means, NaN, infinities, all-zero tensors.")
    ] = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Print tensors, sizes, metadata and what model it is.

    Examples:

      osora ckpt inspect ckpts/Open_Sora_v2.safetensors

      osora ckpt inspect runs/demo --select ema --stats --only '*.bias'
    """
    with errors.interruptible():
        from opensora_cli.settings.ckpt import InspectSettings

        settings = _validated(
            InspectSettings, {"path": ("PATH", path)}, {"only": only, "select": select, "stats": stats}
        )
        require_there(settings.path)
        with errors.uninterrupted():
            from opensora_cli.engine.ckpt import inspect as engine

        output.print_result(engine.inspect(settings, reporter=output.make_reporter(quiet=quiet)), as_json=json_)


def verify(
    path: PathArgument,
    select: Select = None,
    preset: Preset = None,
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="HEX", help="Hash that the file must have.")] = None,
    no_data: Annotated[
        bool, typer.Option("--no-data", help="Read headers and indexes alone: no hashes, no search for NaN.")
    ] = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check that weights are whole and sound; exit code 3 if they are not.

    Examples:

      osora ckpt verify ckpts/Open_Sora_v2.safetensors --preset open-sora-v2
    """
    with errors.interruptible():
        from opensora_cli.settings.ckpt import VerifySettings

        settings = _validated(
            VerifySettings,
            {"path": ("PATH", path), "data": ("--no-data", not no_data)},
            {"select": select, "preset": preset, "sha256": sha256},
        )
        require_there(settings.path)
        with errors.uninterrupted():
            from opensora_cli.engine.ckpt import verify as engine

        result = engine.verify(settings, reporter=output.make_reporter(quiet=quiet))
        output.print_result(result, as_json=json_)
        result.require_sound()


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="File or folder.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="File or folder.", show_default=False)],
    rtol: Annotated[
        float | None, typer.Option("--rtol", metavar="X", help="Relative tolerance, of B. Dtypes may differ, too.")
    ] = None,
    atol: Annotated[
        float | None, typer.Option("--atol", metavar="X", help="Absolute tolerance. Dtypes may differ, too.")
    ] = None,
    only: Only = None,
    select: Select = None,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare names, shapes, dtypes and values; exit code 3 if they differ.

    Without --rtol and --atol every bit must be the same; with one, 8-bit weights are multiplied with their scales. A
    and B may be of different formats.

    Examples:

      osora ckpt diff weights.safetensors weights.pt

      osora ckpt diff fp32.safetensors bf16.safetensors --rtol 0.01
    """
    with errors.interruptible():
        from opensora_cli.settings.ckpt import DiffSettings

        settings = _validated(
            DiffSettings,
            {"first": ("A", first), "second": ("B", second)},
            {"rtol": rtol, "atol": atol, "only": only, "select": select},
        )
        require_there(settings.first, settings.second)
        with errors.uninterrupted():
            from opensora_cli.engine.ckpt import diff as engine

        result = engine.diff(settings, reporter=output.make_reporter(quiet=quiet))
        output.print_result(result, as_json=json_)
        result.require_equal()


def merge_lora(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Weights of the model.", show_default=False)],
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER",
            help="The adapter: PEFT's folder, or a file as of diffusers, ComfyUI or kohya.",
            show_default=False,
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="OUT", help="File or folder to write.", show_default=False)],
    unmerge: Annotated[
        bool, typer.Option("--unmerge", help="Take the adapter out of BASE again, and print how exact that is.")
    ] = False,
    scale: Annotated[
        float | None, typer.Option("--scale", metavar="X", help="Factor of the adapter; 1 is as trained. Default: 1.")
    ] = None,
    format_: Format = None,
    shard_size: ShardSize = None,
    no_hash: NoHash = False,
    overwrite: Overwrite = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fold a LoRA adapter into the weights that it was trained for.

    Examples:

      osora ckpt merge-lora Open_Sora_v2.safetensors my-adapter merged.safetensors

      osora ckpt merge-lora merged.safetensors my-adapter base.safetensors --unmerge
    """
    with errors.interruptible():
        from opensora_cli.engine.ckpt.early import refuse_early
        from opensora_cli.settings.ckpt import MergeLoraSettings

        settings = _validated(
            MergeLoraSettings,
            {"base": ("BASE", base), "adapter": ("ADAPTER", adapter), "target": ("OUT", target)}
            | {"hashing": ("--no-hash", not no_hash)},
            {"unmerge": unmerge, "scale": scale, "format": format_, "shard_size": shard_size, "overwrite": overwrite},
        )
        refuse_early([settings.base, settings.adapter], settings)
        with errors.uninterrupted():
            from opensora_cli.engine.ckpt import merge_lora as engine

        result = engine.merge_lora(settings, reporter=output.make_reporter(quiet=quiet))
        output.print_result(result, as_json=json_)


def download(
    preset: Annotated[
        str,
        typer.Argument(
            metavar="PRESET",
            help="open-sora-v2, open-sora-v2-dc-ae or flux1-dev; text encoders come with each.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="DIR", help="Where to. Default: ckpts, where osora generate looks for it."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that are other than on the Hub.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print files, sizes and licences, and fetch none.")
    ] = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Download a released model from the Hugging Face Hub, and check all of it.

    An interrupted download continues where it stopped. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are respected.

    Examples:

      osora ckpt download open-sora-v2 --dry-run

      osora ckpt download open-sora-v2
    """
    with errors.interruptible():
        from opensora_cli.settings.ckpt import DownloadSettings

        settings = _validated(DownloadSettings, {"preset": ("PRESET", preset)}, {"to": to, "overwrite": overwrite})
        with errors.uninterrupted():
            from opensora_cli.engine.ckpt import download as engine

        if dry_run:
            output.print_result(engine.plan_download(settings), as_json=json_)
        else:
            reporter = output.make_reporter(quiet=quiet)
            output.print_result(engine.download(settings, reporter=reporter), as_json=json_)


for _name, _command in (
    ("convert", convert),
    ("inspect", inspect),
    ("verify", verify),
    ("diff", diff),
    ("merge-lora", merge_lora),
    ("download", download),
):
    app.command(_name, cls=Command)(_command)


@app.callback(invoke_without_command=True)
def _ckpt(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _validated(
    schema: type[SectionT], named: Mapping[str, tuple[str, object]], flags: Mapping[str, object]
) -> SectionT:
    """Return the settings that arguments add up to, by key: some with what the command line calls them, and flags with
    the names of their keys. None: not given.
    """
    from opensora_cli.settings.explain import Given
    from opensora_cli.settings.layers import validate

    given = {**named, **{key: (f"--{key.replace('_', '-')}", value) for key, value in flags.items()}}
    return validate(schema, {key: Given(value, name) for key, (name, value) in given.items() if value is not None})
