"""`osora ckpt convert`: convert weights from any format to any other."""

from pathlib import Path
from typing import ClassVar

import torch

from opensora_cli.checkpoint.contents import Checkpoint
from opensora_cli.checkpoint.fp8 import FP8_DTYPES, dequantize, quantize, separated, without_scales
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.transforms import cast, drop, only, rename
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.ckpt.identify import check, read_released
from opensora_cli.engine.ckpt.layout import change_layout
from opensora_cli.engine.ckpt.output import Derived, write_derived
from opensora_cli.settings.ckpt import ConvertSettings, WeightDType

_DTYPES = {
    WeightDType.FP32: torch.float32,
    WeightDType.BF16: torch.bfloat16,
    WeightDType.FP16: torch.float16,
    WeightDType.FP8_E4M3: torch.float8_e4m3fn,
    WeightDType.FP8_E5M2: torch.float8_e5m2,
}


class Conversion(Derived):
    """Plan or result of a conversion."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.convert/2"


def convert(settings: ConvertSettings, *, dry_run: bool = False, reporter: Reporter | None = None) -> Conversion:
    """Convert a checkpoint of any size, tensor by tensor. With `dry_run`, do only the checks that read no weights.

    The names in `only` and `drop` are those of the source. `rename`, the layout and the dtype are applied after them.

    Raises:
        RequestError: the request contradicts itself or the source.
        CheckpointError: the source is missing or broken, or the result is not the model that `preset` names.
        OutputError: the target exists already, is too large for the disk, or cannot be written.
    """
    released = None if settings.preset is None else read_released(settings.preset)
    source = open_checkpoint(Path(settings.source), select=settings.select)
    entries, metadata = _converted(source, settings)
    if not entries:
        raise RequestError(f"nothing of {source.path} is left to write")
    if released is not None:
        problems = check({name: entry.shape for name, entry in without_scales(entries).items()}, released)
        if problems:
            raise CheckpointError("\n".join(f"{source.path} does not become {settings.preset}: {p}" for p in problems))
    reporter = reporter or SilentReporter()
    return write_derived(Conversion, settings, source, entries, metadata, reporter=reporter, dry_run=dry_run)


def _converted(source: Checkpoint, settings: ConvertSettings) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    entries, metadata = dict(source.entries), dict(source.metadata)
    if settings.dtype is not None:
        # The first step, while every scale still has its name. fp32 represents a scale times any 8-bit number.
        wide = torch.float32 if settings.dtype.is_fp8 else _DTYPES[settings.dtype]
        entries = dequantize(entries, wide)
    if settings.only:
        entries = only(entries, settings.only)
    if settings.drop:
        entries = drop(entries, settings.drop)
    entries = rename(entries, settings.rename)
    if settings.dtype is None and (lost := separated(source.entries, entries)):
        raise RequestError(
            f"without their scales, 8-bit tensors of {source.path} are worth nothing: {first_few(lost)}",
            hint="let only, drop and rename treat both alike, or give --dtype: bf16, or fp8_e4m3 for new scales",
        )
    if settings.qkv is not None or settings.rotary is not None:
        if any(entry.dtype in FP8_DTYPES for entry in entries.values()):
            raise RequestError(
                f"{source.path} has 8-bit weights, whose scales have no other layout",
                hint="give --dtype, too: bf16, or fp8_e4m3 for new scales",
            )
        entries, metadata = change_layout(entries, metadata, qkv=settings.qkv, rotary=settings.rotary)
    if settings.dtype is not None:
        to = _DTYPES[settings.dtype]
        entries = quantize(entries, to) if settings.dtype.is_fp8 else cast(entries, to)
    return entries, metadata
