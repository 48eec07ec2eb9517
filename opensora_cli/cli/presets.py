"""`osora presets`: presets of `osora generate`, with what they need and where they fit."""

from typing import TYPE_CHECKING, NamedTuple

from opensora_cli.cli import options, output
from opensora_cli.cli.command import Command

if TYPE_CHECKING:
    from opensora_cli.settings.layers import Layer

SCHEMA = "osora.presets/2"
_GIB = 2**30


class Needs(NamedTuple):
    """What a preset takes on one GPU, as `osora generate --dry-run --on` predicts it."""

    memory_gib: float
    """GPU memory without offloading."""
    least_memory_gib: float
    """GPU memory with `--offload blocks --resident-blocks 1`."""
    disk_gib: float
    """Weights in bfloat16."""


NEEDS = {
    "256px": Needs(23.0, 15.8, 31.7),
    "768px": Needs(24.7, 20.9, 31.7),
    "demo": Needs(0.2, 0.2, 0.1),
    "flux1_dev": Needs(22.5, 9.2, 31.4),
    "high_compression": Needs(24.1, 9.2, 54.4),
    "t2i2v_256px": Needs(23.5, 15.8, 54.0),
    "t2i2v_768px": Needs(25.1, 20.9, 54.0),
}


def presets(given: "Layer", *, json: bool, quiet: bool) -> None:
    """List the presets with size, needs, and the GPUs that they fit on.

    A preset is the --config of osora generate.

    Examples:

      osora presets

      osora presets --json
    """
    from opensora_cli.settings.files import list_presets
    from opensora_cli.settings.hardware import read_machine
    from opensora_cli.settings.load import load_preset

    gpus = sorted((read_machine(name).gpu for name in list_presets("hardware")), key=lambda gpu: gpu.memory)
    documents, lines = [], []
    for name in list_presets("generate"):
        preset, needs = load_preset(name, prompt="any"), NEEDS[name]
        fits = [gpu.name for gpu in gpus if gpu.free_bytes >= needs.memory_gib * _GIB]
        offloaded = [
            gpu.name for gpu in gpus if needs.least_memory_gib * _GIB <= gpu.free_bytes < needs.memory_gib * _GIB
        ]
        video, sampling = preset.video, preset.sampling
        lines += [
            f"{name}: {preset.model.name}, {video.resolution} {video.aspect_ratio}, {video.num_frames} frames at "
            f"{video.fps} fps, {sampling.num_inference_steps} steps",
            f"  needs {needs.memory_gib} GiB of GPU memory ({needs.least_memory_gib} GiB with --offload blocks), "
            f"{needs.disk_gib} GiB on disk",
            f"  fits {', '.join(fits)}" + (f"; with offload {', '.join(offloaded)}" if offloaded else ""),
        ]
        documents.append(
            {
                "name": name,
                **needs._asdict(),
                "fits": fits,
                "fits_with_offload": offloaded,
                "settings": preset.model_dump(mode="json", exclude={"prompt"}),
            }
        )
    if json:
        output.print_json({"schema": SCHEMA, "presets": documents})
    else:
        output.print_lines(lines)


COMMAND = Command("presets", presets, options.PRINTED, layered=True)
