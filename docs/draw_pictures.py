"""Draw the plots of the pages from plans of `osora generate --dry-run --json` and from the log of a training.

    python docs/draw_pictures.py
    python docs/draw_pictures.py gpu_memory time_by_gpus

Needs the extra `plot`. The pictures are written to `docs/pictures/`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent / "pictures"
LORA_LOG = Path(__file__).parents[1] / "benchmarks" / "logs" / "demo_lora.jsonl"
GIB = 2**30
RESOLUTIONS = {"256px": "#3f51b5", "768px": "#e65100"}
SIZES = (6, 8, 12, 16, 24, 32)
COUNTS = (1, 2, 4, 8)
GPUS = {"4090": "RTX 4090", "A100-80GB": "A100", "H100": "H100"}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "osora",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


@cache
def plan(resolution: str, hardware: str) -> Any:
    """Return the JSON plan of a video with 129 frames on the hardware of `--on`."""
    command = [sys.executable, "-m", "opensora_cli", "generate", "raining, sea", "--res", resolution]
    command += ["--dry-run", "--on", hardware, "--json", "--quiet"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def gpu_memory(axes: Any) -> None:
    """Draw the peak of GPU memory by the size of the GPU."""
    for number, (resolution, color) in enumerate(RESOLUTIONS.items()):
        plans = [plan(resolution, f"{size}GiB") for size in SIZES]
        places = [place + 0.38 * (number - 0.5) for place in range(len(SIZES))]
        peaks = [each["peak_bytes"] / GIB for each in plans]
        axes.bar(places, peaks, width=0.36, color=color, label=resolution)
        for place, peak, each in zip(places, peaks, plans, strict=True):
            resident = each["jobs"][0]["offload"]["resident_blocks"]
            axes.text(place, peak + 0.4, "all" if resident is None else resident, ha="center", fontsize=8)
    axes.set_xticks(range(len(SIZES)), [str(size) for size in SIZES])
    axes.set_xlabel("GPU memory, GiB")
    axes.set_ylabel("peak of a video, GiB")
    axes.set_title("Memory (predicted). Numbers: blocks on the GPU, of 57", fontsize=9)
    axes.legend(loc="upper left")


def time_by_gpus(axes: Any) -> None:
    """Draw the predicted time of a video on 1 to 8 GPUs."""
    markers = dict(zip(GPUS, "osD", strict=True))
    for resolution, color in RESOLUTIONS.items():
        for gpu, name in GPUS.items():
            minutes = [plan(resolution, f"{count}x{gpu}")["predicted"]["seconds"] / 60 for count in COUNTS]
            axes.plot(COUNTS, minutes, color=color, marker=markers[gpu], markersize=4, label=f"{resolution}, {name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
    axes.set_yticks([0.1, 1, 10, 60], ["6 s", "1 min", "10 min", "1 h"])
    axes.minorticks_off()
    axes.set_xlabel("GPUs")
    axes.set_title("Time of a video, 129 frames (predicted)", fontsize=9)
    axes.legend(fontsize=7, loc="lower left", ncols=2)
    axes.set_ylim(bottom=0.012)


def memory_over_a_run(axes: Any) -> None:
    """Draw the memory of each stage of a video at 768px, on GPUs of several sizes."""
    colors = ("#90caf9", "#3f51b5", "#e65100", "#6d4c41")
    for color, size in zip(colors, (8, 16, 24, 80), strict=True):
        stages = plan("768px", f"{size}GiB")["jobs"][0]["stages"]
        heights = [stage["total_bytes"] / GIB for stage in stages]
        # Stages differ in time by a factor of 1,000: each gets the same width.
        axes.stairs([0, *heights, 0], range(len(heights) + 3), color=color, linewidth=2, label=f"{size} GiB")
    axes.set_xticks([1.5, 2.5, 3.5], ["text", "denoise", "decode"])
    axes.set_ylabel("GPU memory, GiB")
    axes.set_title("One video at 768px on GPUs of four sizes (predicted)", fontsize=9)
    axes.legend(fontsize=8, loc="upper left")


def lora_loss(axes: Any) -> None:
    """Draw the loss of the LoRA tutorial."""
    rows = [json.loads(line) for line in LORA_LOG.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "event" not in row]
    validations = [row for row in rows if row.get("event") == "validation"]
    axes.plot(
        [row["step"] for row in steps], [row["loss"] for row in steps], color="#9fa8da", linewidth=1, label="step"
    )
    axes.plot(
        [row["step"] for row in validations],
        [row["loss"] for row in validations],
        color="#e65100",
        linewidth=2,
        label="validation: four other clips, always the same noise",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title("Training of demo_lora on eight clips", fontsize=9)
    axes.legend(fontsize=8)
    axes.set_ylim(bottom=0)


PICTURES: dict[str, tuple[Callable[[Any], None], ...]] = {
    "gpu_memory": (gpu_memory,),
    "time_by_gpus": (time_by_gpus,),
    "memory_over_a_run": (memory_over_a_run,),
    "memory_and_time": (gpu_memory, time_by_gpus),
    "lora_loss": (lora_loss,),
}
"""Panels of each picture."""


def draw(name: str) -> Path:
    """Draw a picture, and return its path."""
    panels = PICTURES[name]
    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.4), squeeze=False)
        for panel, axes in zip(panels, grid[0], strict=True):
            panel(axes)
        figure.tight_layout()
        path = FOLDER / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(figure)
    return path


def main() -> None:
    """Draw the named pictures, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"pictures to draw: {', '.join(PICTURES)} (all)")
    names = parser.parse_args().names
    if unknown := set(names) - PICTURES.keys():
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    for name in names or PICTURES:
        print(draw(name))


if __name__ == "__main__":
    main()
