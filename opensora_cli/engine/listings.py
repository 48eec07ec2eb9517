"""Presets of generation with their needs and GPUs, and recipes of training. Needs no torch."""

from pathlib import Path
from typing import Any

from opensora_cli.core.documents import Document
from opensora_cli.settings.hardware import read_machine
from opensora_cli.settings.layers import describe_preset, list_presets, preset_path
from opensora_cli.settings.load import load_preset

_GIB = 2**30

NEEDS = {
    "256px": (23.0, 1.3, 31.7),
    "768px": (24.7, 3.0, 31.7),
    "demo": (0.2, 0.1, 0.1),
    "flux1_dev": (22.5, 1.5, 31.4),
    "high_compression": (24.1, 4.1, 54.4),
    "t2i2v_256px": (23.5, 1.5, 54.0),
    "t2i2v_768px": (25.1, 3.0, 54.0),
}
"""`memory_gib`, `least_memory_gib` and `disk_gib` of each preset, as `osora generate --dry-run --on` predicts them."""

_USABLE = 0.95
"""Share of the free memory that a plan without offloading may take."""


class Preset(Document):
    """Preset of generation."""

    name: str
    memory_gib: float
    """GPU memory without offloading."""
    least_memory_gib: float
    """Least free GPU memory for which the automatic plan fits."""
    disk_gib: float
    """Weights in bfloat16."""
    fits: tuple[str, ...]
    """GPUs on which the automatic plan offloads nothing."""
    fits_with_offload: tuple[str, ...]
    """GPUs on which the automatic plan offloads."""
    settings: dict[str, Any]

    def lines(self) -> list[str]:
        video, steps = self.settings["video"], self.settings["sampling"]["num_inference_steps"]
        model, size = self.settings["model"]["name"], f"{video['resolution']} {video['aspect_ratio']}"
        offloaded = f"; with offload {', '.join(self.fits_with_offload)}" if self.fits_with_offload else ""
        length = "a picture" if video["num_frames"] == 1 else f"{video['num_frames']} frames at {video['fps']} fps"
        return [
            f"{self.name}: {model}, {size}, {length}, {steps} steps",
            f"  needs {self.memory_gib} GiB of GPU memory ({self.least_memory_gib} GiB with offloading), "
            f"{self.disk_gib} GiB on disk",
            f"  fits {', '.join(self.fits)}{offloaded}",
        ]


class Presets(Document):
    """Presets of generation."""

    SCHEMA = "osora.presets/2"

    presets: tuple[Preset, ...]

    def lines(self) -> list[str]:
        return [line for preset in self.presets for line in preset.lines()]


def describe_presets() -> Presets:
    gpus = sorted((read_machine(name).gpu for name in list_presets("hardware")), key=lambda gpu: gpu.memory)

    def describe(name: str) -> Preset:
        most, least, disk = NEEDS[name]
        whole = most * _GIB / _USABLE
        return Preset(
            name=name,
            memory_gib=most,
            least_memory_gib=least,
            disk_gib=disk,
            fits=tuple(gpu.name for gpu in gpus if gpu.free_bytes >= whole),
            fits_with_offload=tuple(gpu.name for gpu in gpus if least * _GIB <= gpu.free_bytes < whole),
            settings=load_preset(name).model_dump(mode="json", exclude={"prompt"}),
        )

    return Presets(presets=tuple(map(describe, list_presets("generate"))))


class Recipe(Document):
    """Recipe of training."""

    name: str
    description: str
    file: Path


class Recipes(Document):
    """Recipes of training."""

    SCHEMA = "osora.recipes/1"

    recipes: tuple[Recipe, ...]

    def lines(self) -> list[str]:
        width = max(len(recipe.name) for recipe in self.recipes)
        return [f"{recipe.name:{width}}  {recipe.description}" for recipe in self.recipes]


def describe_recipes() -> Recipes:
    return Recipes(
        recipes=tuple(
            Recipe(name=name, description=describe_preset("train", name), file=preset_path(name, "train"))
            for name in list_presets("train")
        )
    )
