"""Convert weights to bfloat16 and compare both: python examples/convert_a_checkpoint.py SOURCE TARGET."""

import sys
from pathlib import Path

from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.engine.ckpt.convert import convert
from opensora_cli.settings.tools import ConvertSettings, WeightDType


def main(source: str, target: str) -> None:
    convert(ConvertSettings(source=source, target=target, dtype=WeightDType.BF16))
    before, after = open_checkpoint(Path(source)), open_checkpoint(Path(target))
    # One tensor at a time is in memory.
    largest = max(
        float((before.entries[name].read().float() - entry.read().float()).abs().max())
        for name, entry in after.entries.items()
    )
    name, entry = next(iter(after.entries.items()))
    print(f"{len(after.entries)} tensors, {name} is {before.entries[name].dtype} and {entry.dtype}")
    print(f"the largest difference of two values is {largest:.3g}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
