"""`osora vae`: what autoencoders make of pictures and videos."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opensora_cli.cli import errors, options, output
from opensora_cli.cli.command import Command, Group

if TYPE_CHECKING:
    from opensora_cli.core.progress import Reporter
    from opensora_cli.settings.vae_reconstruct import EncodeSettingsT

app = typer.Typer(cls=Group, help="See what an autoencoder makes of pictures and videos.")

Files = Annotated[list[str], typer.Argument(metavar="FILE", help="Pictures and videos.", show_default=False)]
FilesAndFolders = Annotated[
    list[str], typer.Argument(metavar="FILE", help="Pictures and videos, or folders of them.", show_default=False)
]
Out = Annotated[
    str | None, typer.Option("--out", "-o", metavar="DIR", help="Folder of the results. Default: reconstructed/")
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="NAME|FILE",
        help="demo, hunyuan, dc_ae or flux_ae; a YAML file of settings; a .py configuration of the reference; or what "
        "osora train was given or wrote (settings.json), for the autoencoder that it trained. Default: demo.",
        autocompletion=options.completed_settings("vae", "train"),
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights", metavar="DIR", help="Folder with the weights. Default: ./ckpts or the Hugging Face cache."
    ),
]
ClipFrames = Annotated[
    int | None,
    typer.Option("--clip-frames", metavar="N", help="Longest clip that is encoded at once; longer videos in several."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as in vae.temporal_tiling=true. Repeatable."),
]
NoMetadata = Annotated[bool, typer.Option("--no-metadata", help="Write no sidecar beside a result.")]


def _settings(
    schema: "type[EncodeSettingsT]",
    flags: Mapping[str, tuple[str, object]],
    *,
    config: Path | None,
    assignments: Sequence[str],
    reporter: "Reporter",
) -> "EncodeSettingsT":
    """Return the settings that flags (None: not given), assignments, environment and configuration add up to."""
    from opensora_cli.settings.explain import Given
    from opensora_cli.settings.layers import collect_overrides
    from opensora_cli.settings.vae_reconstruct import load_vae_settings

    given = {key: Given(value, flag) for key, (flag, value) in flags.items() if value is not None}
    overrides = collect_overrides(schema, given, assignments)
    return load_vae_settings(schema, config=config, overrides=overrides, environment=os.environ, report=reporter.note)


def reconstruct(
    files: Files,
    config: Config = None,
    weights: Weights = None,
    out: Out = None,
    clip_frames: ClipFrames = None,
    overwrite: options.Overwrite = False,
    no_metadata: NoMetadata = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    set_: Assignments = None,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Encode and decode files, write both side by side, and print PSNR and SSIM.

    The original is left, the reconstruction right. Sizes are cropped to what the autoencoder takes.

    Examples:

      osora vae reconstruct boat.mp4 house.png

      osora vae reconstruct boat.mp4 --config hunyuan --weights ckpts -o compared

      osora vae reconstruct boat.mp4 --config runs/vae/settings.json
    """
    flags = {
        "files": ("FILE", tuple(files)),
        "runtime.weights": ("--weights", weights),
        "runtime.device": ("--device", device),
        "runtime.dtype": ("--dtype", dtype),
        "runtime.threads": ("--threads", threads),
        "output.folder": ("--out", out),
        "output.overwrite": ("--overwrite", True if overwrite else None),
        "output.metadata": ("--no-metadata", False if no_metadata else None),
        "clip.num_frames": ("--clip-frames", clip_frames),
    }
    with errors.interruptible():
        from opensora_cli.engine.vae.early import refuse_early
        from opensora_cli.settings.vae_reconstruct import ReconstructSettings

        reporter = output.make_reporter(quiet=quiet)
        settings = _settings(ReconstructSettings, flags, config=config, assignments=set_ or [], reporter=reporter)
        refuse_early(settings)
        with errors.uninterrupted():
            from opensora_cli.engine.vae import reconstruct as engine

        result = engine.reconstruct(settings, reporter=reporter)
        output.print_result(result, as_json=json_)
        result.require_whole()


def stats(
    files: FilesAndFolders,
    config: Config = None,
    weights: Weights = None,
    clip_frames: ClipFrames = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    set_: Assignments = None,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Print mean and deviation of the latents of files, channel by channel.

    The last line has the settings that a transformer is trained with over this autoencoder: its scale, and its shift.
    Sizes are cropped to what the autoencoder takes. Writes nothing.

    Examples:

      osora vae stats clips/ house.png

      osora vae stats clips/ --config runs/vae/settings.json --json
    """
    flags = {
        "files": ("FILE", tuple(files)),
        "runtime.weights": ("--weights", weights),
        "runtime.device": ("--device", device),
        "runtime.dtype": ("--dtype", dtype),
        "runtime.threads": ("--threads", threads),
        "clip.num_frames": ("--clip-frames", clip_frames),
    }
    with errors.interruptible():
        from opensora_cli.engine.vae.early import refuse_early
        from opensora_cli.settings.vae_reconstruct import EncodeSettings

        reporter = output.make_reporter(quiet=quiet)
        settings = _settings(EncodeSettings, flags, config=config, assignments=set_ or [], reporter=reporter)
        refuse_early(settings)
        with errors.uninterrupted():
            from opensora_cli.engine.vae.stats import latent_statistics

        result = latent_statistics(settings, reporter=reporter)
        output.print_result(result, as_json=json_)
        result.require_whole()


app.command("reconstruct", cls=Command)(reconstruct)
app.command("stats", cls=Command)(stats)


@app.callback(invoke_without_command=True)
def _vae(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
