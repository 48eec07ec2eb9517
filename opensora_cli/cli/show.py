"""`osora show`: prompt, seed, settings and timings that a file records."""

from pathlib import Path

from opensora_cli.cli.call import Call
from opensora_cli.cli.command import make_command
from opensora_cli.settings.ckpt import InspectSettings
from opensora_cli.settings.flags import Option


def show(settings: InspectSettings, call: Call) -> None:
    """Print prompt, seed, settings and timings of a result, and what a checkpoint holds.

    FILE is a video or picture, its sidecar, a saved state, latents, weights, or a folder of a training run.

    Examples:

      osora show samples/raining-sea_seed42.mp4

      osora show runs/demo --json
    """
    from opensora_cli.engine.show import Shown, run_settings, show_recorded

    path = Path(settings.path)
    shown = show_recorded(path)
    if shown is None:
        with call.loading():
            from opensora_cli.engine.ckpt.inspect import inspect

        inspection = inspect(settings, reporter=call.reporter)
        shown = Shown(
            path=path,
            kind="checkpoint",
            settings=run_settings(path),
            recorded={key: value for key, value in inspection.to_json().items() if key != "tensors"},
            summary=tuple(inspection.summary()),
        )
    call.show(shown)


COMMAND = make_command("show", show, {"FILE": Option("path")}, settings=InspectSettings)
