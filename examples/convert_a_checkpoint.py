"""Store weights in 16 bits, and measure the difference: python examples/convert_a_checkpoint.py SOURCE TARGET."""

import math
import sys
from pathlib import Path

import torch

from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.engine.ckpt.convert import convert
from opensora_cli.settings.ckpt import ConvertSettings, WeightDType


def main(source: str, target: str) -> None:
    convert(ConvertSettings(source=source, target=target, dtype=WeightDType.BF16))
    before, after = open_checkpoint(Path(source)), open_checkpoint(Path(target))
    name = next(name for name in after.entries if after.entries[name].dtype is torch.bfloat16)
    print(f"{name}: {before.entries[name].dtype} became {after.entries[name].dtype}")
    bytes_before, bytes_after = (
        sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in each.entries.values())
        for each in (before, after)
    )
    print(f"{bytes_before / 2**20:.1f} MiB became {bytes_after / 2**20:.1f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:3])
