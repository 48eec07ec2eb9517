"""Predict what a video takes, and whether it fits, without loading weights: estimate_memory.py [PRESET [GIB]]."""

import sys

import torch

from opensora_cli.core.device import GIB
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.engine.generate.chain import make_chain
from opensora_cli.settings.load import load_preset


def main(preset: str = "256px", gib: str = "16") -> None:
    free = int(float(gib) * GIB)
    # A GPU of that size need not be present: nothing runs on it.
    gpu = Hardware(torch.device("cuda"), "example GPU", torch.bfloat16, free_bytes=free, total_bytes=free)
    chain = make_chain(load_preset(preset, prompt="raining, sea"), hardware=gpu)
    plan = chain.video
    print(f"{preset}: {plan.video_tokens:,} tokens, {chain.model_evaluations} evaluations of the model")
    for stage in chain.stages:
        print(f"  {stage.name}: {stage.total_bytes / GIB:.1f} GiB")
    for line in plan.offload.lines():
        print(f"  {line}")
    print(f"  {'fits' if chain.fits else 'does not fit'} into {gib} GiB")


if __name__ == "__main__":
    main(*sys.argv[1:3])
