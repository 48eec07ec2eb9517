"""Train a LoRA on a folder of clips with captions: python examples/train_a_lora.py FOLDER [STEPS]."""

import sys
from pathlib import Path

from opensora_cli.engine.data.scan import scan
from opensora_cli.engine.train.run import train
from opensora_cli.settings.layers import Given
from opensora_cli.settings.tools import ScanSettings
from opensora_cli.settings.train import load_train_settings


def main(folder: str, steps: str = "60") -> None:
    found = scan(ScanSettings(folder=folder, overwrite=True))
    print(f"{found.table}: {found.videos} videos, {found.pictures} pictures")
    # The recipe computes in bfloat16, which is slow on CPUs without instructions for it.
    float32 = {
        "precision.compute": "fp32",
        "train_mmdit.frozen_dtype": "float32",
        "train_mmdit.attention": "sdpa",
    }
    changes = {"data.table": str(found.table), "loop.steps": steps, **float32}
    settings = load_train_settings(
        config=Path("demo_lora"),
        overrides={key: Given(value, "this script") for key, value in changes.items()},
        environment={},
    )
    result = train(settings)
    assert result is not None  # None only where ranks were started
    print(f"{result.steps} steps: {', '.join(result.lines())}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
