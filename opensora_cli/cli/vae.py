"""`osora vae`: reconstruct pictures and videos with an autoencoder, and measure its latents."""

import os

from opensora_cli.cli.app import make_group
from opensora_cli.cli.command import CONFIG, SET, Call, device_rows, make_command
from opensora_cli.engine.vae.early import refuse_early
from opensora_cli.settings.flags import MACHINE, OUTPUT, Option
from opensora_cli.settings.layers import Layer, collect_overrides
from opensora_cli.settings.tools import EncodeSettings, EncodeSettingsT, ReconstructSettings, load_vae_settings


def reconstruct(given: Layer, call: Call) -> None:
    """Encode and decode files, write both side by side, and print PSNR and SSIM.

    The original is on the left. Sizes are cropped to multiples that the autoencoder supports.

    Examples:
      osora vae reconstruct boat.mp4 house.png
      osora vae reconstruct boat.mp4 --config hunyuan --weights ckpts -o compared
      osora vae reconstruct boat.mp4 --config runs/vae/settings.json
    """
    settings = _settings(ReconstructSettings, given, call)
    with call.loading():
        from opensora_cli.engine.vae import reconstruct as engine

    call.show(engine.reconstruct(settings, reporter=call.reporter))


def stats(given: Layer, call: Call) -> None:
    """Print mean and deviation of the latents of files, by channel.

    The last line has the scale and shift with which a transformer is trained over this autoencoder. Sizes are cropped
    to multiples that the autoencoder supports. Writes nothing.

    Examples:
      osora vae stats clips/ house.png
      osora vae stats clips/ --config runs/vae/settings.json --json
    """
    settings = _settings(EncodeSettings, given, call)
    with call.loading():
        from opensora_cli.engine.vae.stats import latent_statistics

    call.show(latent_statistics(settings, reporter=call.reporter))


def _settings(schema: type[EncodeSettingsT], given: Layer, call: Call) -> EncodeSettingsT:
    overrides = collect_overrides(schema, given, call.assignments)
    settings = load_vae_settings(schema, config=call.config, overrides=overrides, environment=os.environ)
    refuse_early(settings)
    return settings


_MODEL_ROWS = {
    "--config": CONFIG._replace(
        help="Preset (hunyuan, dc_ae, flux_ae), file, or settings.json of a training run.", default="demo"
    ),
    "--set": SET._replace(help="Set any setting, as in vae.temporal_tiling=true."),
    "--clip-frames": Option("clip.num_frames"),
    "--weights": Option("runtime.weights", MACHINE, metavar="DIR"),
    **device_rows("runtime."),
    "--dtype": Option("runtime.dtype", MACHINE),
}
_RECONSTRUCT_ROWS = {
    "FILE": Option("files"),
    **_MODEL_ROWS,
    "--out": Option("output.folder", OUTPUT, "Folder of the results.", "DIR", short="-o"),
    "--overwrite": Option("output.overwrite", OUTPUT),
    "--no-metadata": Option("output.metadata", OUTPUT, "Write no sidecar beside a result.", is_negated=True),
}
_STATS_ROWS = {"FILE": Option("files", help="Pictures and videos, or folders of them."), **_MODEL_ROWS}
COMMAND = make_group(
    "vae",
    "Reconstruct pictures and videos with an autoencoder, and measure its latents.",
    make_command(reconstruct, _RECONSTRUCT_ROWS, settings=ReconstructSettings),
    make_command(stats, _STATS_ROWS, settings=EncodeSettings),
)
