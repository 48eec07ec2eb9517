"""The options that commands of `osora ckpt` share, once each."""

from typing import Annotated

import typer

from opensora_cli.settings.enums import QKVLayout, RotaryLayout, TargetFormat, WeightDType, WeightSelection

_WEIGHTS = "Weights"
_TARGET = "Output"

Source = Annotated[str, typer.Argument(metavar="SRC", help="File or folder to read.", show_default=False)]
Target = Annotated[str, typer.Argument(metavar="DST", help="File or folder to write.", show_default=False)]
Path = Annotated[str, typer.Argument(metavar="PATH", help="File or folder.", show_default=False)]

Select = Annotated[
    WeightSelection | None,
    typer.Option("--select", help="Which weights of a training; model if not given.", rich_help_panel=_WEIGHTS),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Only tensors of such names, as in 'double_blocks.*'. Repeatable.",
        rich_help_panel=_WEIGHTS,
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        "--drop", metavar="PATTERN", help="No tensors of such names in SRC. Repeatable.", rich_help_panel=_WEIGHTS
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
    typer.Option("--rotary", help="How rotary pairs lie in a head.", rich_help_panel=_WEIGHTS),
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
    typer.Option("--shard-size", metavar="SIZE", help="As in 4GB or 4096MiB (the default).", rich_help_panel=_TARGET),
]
NoHash = Annotated[
    bool,
    typer.Option("--no-hash", help="Do not note hashes of SRC and of shards: faster.", rich_help_panel=_TARGET),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST.", rich_help_panel=_TARGET)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print what would be done, and do nothing.")]
