"""Draw the pictures of README and pages: plots, contact sheets, videos, the terminal and the page of the server.

    python docs/draw_pictures.py
    python docs/draw_pictures.py gpu_memory time_by_gpus red-boat

Plots come from plans of `osora generate --dry-run --json` and from logs. The demo model makes sheets and videos, in ten
minutes of processor time. A video's description on the page is its prompt. `serve` needs Chromium, and all the
development environment.
"""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from PIL import Image

from opensora_cli.media.read import read_video
from opensora_cli.media.write import contact_sheet

mpl.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
VIDEOS = ROOT / ".readme"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
LORA_LOG = ROOT / "benchmarks" / "logs" / "demo_lora.jsonl"
MODES_LOG = ROOT / "benchmarks" / "logs" / "demo_modes.json"
GIB = 2**30
RESOLUTIONS = {"256px": "#3f51b5", "768px": "#e65100"}
SIZES = (6, 8, 12, 16, 24, 32)
COUNTS = (1, 2, 4, 8)
GPUS = {"4090": "RTX 4090", "A100-80GB": "A100", "H100": "H100"}
STYLE: Any = {
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


def demo_modes(axes: Any) -> None:
    """Draw quality against evaluations of the demo: exact, `--fast` and `--turbo`."""
    report = json.loads(MODES_LOG.read_text(encoding="utf-8"))
    trials = sorted(report["prompts"], key=lambda trial: trial["model_evaluations"])
    evaluations = [trial["model_evaluations"] for trial in trials]
    for label, color, values in (
        ("words of the prompt read back", "#3f51b5", [trial["accuracy"]["mean"] for trial in trials]),
        ("detail, of that of renders", "#e65100", [trial["detail_of_renders"] for trial in trials]),
        ("broken videos", "#6d4c41", [len(trial["broken"]) / trial["videos"] for trial in trials]),
    ):
        axes.plot(evaluations, [100 * value for value in values], color=color, marker="o", markersize=4, label=label)
        for place, value in zip(evaluations, values, strict=True):
            text, at = f"{100 * value:.3g} %", (place, 100 * value)
            axes.annotate(text, at, (0, 5), textcoords="offset points", ha="center", fontsize=8)
    names = [f"{trial['model_evaluations']}\n{trial['mode']}" for trial in trials]
    axes.set_xticks(evaluations, names, fontsize=8)
    axes.set_xlabel("evaluations")
    axes.set_ylabel("percent")
    axes.set_title("Quality of the demo (measured)", fontsize=9)
    axes.set_ylim(0, 110)
    axes.legend(fontsize=8, loc="center right")


PLOTS: dict[str, tuple[Callable[[Any], None], ...]] = {
    "gpu_memory": (gpu_memory,),
    "time_by_gpus": (time_by_gpus,),
    "memory_over_a_run": (memory_over_a_run,),
    "memory_and_time": (gpu_memory, time_by_gpus),
    "lora_loss": (lora_loss,),
    "demo_modes": (demo_modes,),
}
"""Panels of each plot."""


def plot(name: str) -> Path:
    """Draw a plot, and return its path."""
    panels = PLOTS[name]
    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.4), squeeze=False)
        for panel, axes in zip(panels, grid[0], strict=True):
            panel(axes)
        figure.tight_layout()
        path = FOLDER / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(figure)
    return path


def generate(folder: Path, *words: str) -> None:
    """Run `osora generate` with the demo model in a folder."""
    command = [sys.executable, "-m", "opensora_cli", "generate", *words]
    command += ["--model", "demo", "--device", "cpu", "--overwrite", "--quiet"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def strip(path: Path, places: Iterable[int], *, given: Sequence[int] = ()) -> torch.Tensor:
    """Return some frames of a video side by side, with an orange border around the given ones."""
    frames_THWC = read_video(path).frames_THWC
    gap_HWC = torch.full_like(frames_THWC[0, :, :4], 32)
    shown: list[torch.Tensor] = []
    for place in places:
        picture_HWC = frames_THWC[place].clone()
        if place in given:
            inside_HWC = picture_HWC[4:-4, 4:-4].clone()
            picture_HWC[:] = torch.tensor([255, 152, 0], dtype=torch.uint8)
            picture_HWC[4:-4, 4:-4] = inside_HWC
        shown += [gap_HWC, picture_HWC]
    return torch.cat(shown[1:], dim=1)


FIVE_FRAMES = (0, 8, 16, 24, 32)
Cells = list[tuple[str, torch.Tensor]]


def demo_world(folder: Path) -> Cells:
    """Make videos of the demo's places, weathers, times and things: two frames of each."""
    prompts = [
        *("sunny, sea, a red boat moving left", "raining, sea, night", "snowing, city, a yellow car"),
        *("city, sunset, a blue bird", "raining, forest, a green ball", "snowing, forest, night"),
        *("sunny, desert, a blue car", "desert, sunset, a red bird"),
    ]
    rows = [f'{number},"{prompt}"' for number, prompt in enumerate(prompts)]
    (folder / "prompts.csv").write_text("\n".join(["name,prompt", *rows]), encoding="utf-8")
    generate(folder, "--prompts", "prompts.csv", "--out", ".")
    return [(prompt, strip(folder / f"{number}.mp4", (8, 24))) for number, prompt in enumerate(prompts)]


def condition_modes(folder: Path) -> Cells:
    """Make the videos of the tutorial about given pictures."""
    prompt = "a red boat moving left on the sea"
    generate(folder, prompt, "--num-frames", "1", "--out", "boat.png")
    generate(folder, prompt, "--out", "boat.mp4")
    cells = [("t2v: boat.mp4", strip(folder / "boat.mp4", FIVE_FRAMES))]
    for mode, reference, given in (
        ("i2v_head", "boat.png", (0,)),
        ("i2v_tail", "boat.png", (32,)),
        ("i2v_loop", "boat.png;boat.png", (0, 32)),
        ("v2v_head", "boat.mp4", (0, 8)),
        ("v2v_tail", "boat.mp4", (24, 32)),
    ):
        generate(folder, prompt, "--ref", reference, "--cond", mode, "--out", f"{mode}.mp4")
        cells.append((f"{mode}: {reference}", strip(folder / f"{mode}.mp4", FIVE_FRAMES, given=given)))
    return cells


def fast_and_turbo(folder: Path) -> Cells:
    """Make a video exactly, with `--fast` and with `--turbo`."""
    cells = []
    for name, options in (("exact", ()), ("--fast", ("--fast",)), ("--turbo", ("--turbo",))):
        generate(folder, "a red boat moving left on the sea at night", *options, "--out", f"{name}.mp4")
        cells.append((name, strip(folder / f"{name}.mp4", FIVE_FRAMES)))
    return cells


def explore(folder: Path) -> Image.Image:
    """Explore six seeds, and return the sheet at half its size."""
    generate(folder, "raining, sea", "--explore", "6", "--explore-steps", "8", "--out", "sea.mp4")
    (path,) = folder.glob("*.explore.png")
    return Image.open(path).reduce(2)


SHEETS: dict[str, Callable[[Path], Cells | Image.Image]] = {
    "demo_world": demo_world,
    "condition_modes": condition_modes,
    "explore": explore,
    "fast_and_turbo": fast_and_turbo,
}
"""Functions that make the parts of each contact sheet in a folder."""


def sheet(name: str) -> Path:
    """Draw a contact sheet, and return its path."""
    with tempfile.TemporaryDirectory() as folder:
        made = SHEETS[name](Path(folder))
    picture = made if isinstance(made, Image.Image) else Image.fromarray(contact_sheet(made).numpy())
    path = FOLDER / f"{name}.webp"
    picture.save(path, quality=80, method=6)
    return path


_SHOWN = (
    re.compile(r'<img src="\.readme/(?P<name>[\w-]+)\.gif"[^>]* alt="(?P<prompt>[^"]+)"'),
    re.compile(r"!\[(?P<prompt>[^\]]+)\]\(pictures/(?P<name>[\w-]+)\.gif\)"),
)


def shown_prompts(pages: Sequence[Path] = PAGES) -> dict[str, str]:
    """Return the prompt of each video that the pages show, by its name.

    Raises:
        ValueError: two pages describe a video differently.
    """
    prompts: dict[str, str] = {}
    for text in (page.read_text(encoding="utf-8") for page in pages):
        for match in (match for form in _SHOWN for match in form.finditer(text)):
            name, prompt = match["name"], match["prompt"]
            if prompts.setdefault(name, prompt) != prompt:
                raise ValueError(f"{name}.gif is described as {prompts[name]!r} and as {prompt!r}")
    return prompts


def video(name: str) -> Path:
    """Make a video of README or the first page, and return its path."""
    path = VIDEOS / f"{name}.gif"
    generate(ROOT, shown_prompts()[name], "--out", str(path))
    # The page says how the video was made, so it needs no sidecar.
    path.with_name(f"{path.name}.json").unlink()
    return path


def terminal(name: str) -> Path:
    """Record the terminal of a first run, and return the path of its picture."""
    subprocess.run([sys.executable, ROOT / "docs" / "record_terminal.py"], check=True, stdout=subprocess.DEVNULL)
    return FOLDER / f"{name}.svg"


def server_page(name: str) -> Path:
    """Take a picture of the page of `osora serve` with Chromium, and return its path."""
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(ROOT / "tests"))
    from served import Served

    path = ROOT / "docs" / "images" / f"{name}.png"
    with (
        tempfile.TemporaryDirectory() as folder,
        Served(Path(folder) / "serve") as served,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]) as browser,
    ):
        page = browser.new_page(viewport={"width": 1160, "height": 1000}, color_scheme="light")
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.fill("#steps", "12")
        for prompt in ("a red boat moving left on the sea at night", "raining, sea", "a yellow car, snowing, city"):
            page.fill("#prompt", prompt)
            page.fill("#seed", "7")
            page.click("#submit")
        page.locator("#gallery .result").nth(2).wait_for(timeout=300_000)
        for prompt in ("a green ball rolls to the left in the desert at sunset", "a blue bird over the rainy forest"):
            page.fill("#prompt", prompt)
            page.fill("#steps", "200")
            page.click("#submit")
        page.locator("#queue .job img:visible").wait_for(timeout=300_000)
        page.wait_for_timeout(5000)
        shown = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    shown.convert("P", palette=Image.Palette.ADAPTIVE, colors=96).save(path, optimize=True)
    return path


PICTURES: dict[str, Callable[[str], Path]] = {
    **dict.fromkeys(SHEETS, sheet),
    **dict.fromkeys(shown_prompts(), video),
    "terminal": terminal,
    "serve": server_page,
    **dict.fromkeys(PLOTS, plot),
}
"""Functions that draw a picture by its name, and return its path."""


def main() -> None:
    """Draw the named pictures, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"pictures to draw: {', '.join(PICTURES)} (all)")
    names = parser.parse_args().names
    if unknown := set(names) - PICTURES.keys():
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    for name in names or PICTURES:
        print(PICTURES[name](name), flush=True)


if __name__ == "__main__":
    main()
