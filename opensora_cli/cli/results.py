"""`osora show`, `osora gallery` and `osora presets`: results, and what can be made."""

from pathlib import Path

from opensora_cli.cli.command import Call, make_command
from opensora_cli.core.reading import require_there
from opensora_cli.engine.listings import describe_presets
from opensora_cli.settings.flags import Option
from opensora_cli.settings.layers import Layer, validate
from opensora_cli.settings.tools import GallerySettings, InspectSettings


def show(given: Layer, call: Call) -> None:
    """Print prompt, seed, settings and timings of a result, and what a checkpoint holds.

    FILE is a video or picture, its sidecar, a saved state, latents, weights, or a folder of a training run.

    Examples:
      osora show samples/raining-sea_seed42.mp4
      osora show runs/demo --json
    """
    from opensora_cli.engine.show import Shown, run_settings, show_recorded

    settings = validate(InspectSettings, given)
    path = Path(settings.path)
    shown = show_recorded(path)
    if shown is None:
        with call.loading():
            from opensora_cli.engine.ckpt.inspect import inspect

        inspection = inspect(settings)
        shown = Shown(
            path=path,
            kind="checkpoint",
            settings=run_settings(path),
            recorded={key: value for key, value in inspection.to_json().items() if key != "tensors"},
            summary=inspection.summary,
        )
    call.show(shown)


def gallery(settings: GallerySettings, call: Call) -> None:
    """Write one HTML page of a folder of results, with posters, settings and a filter by words.

    Videos play under the pointer. The page names them by relative paths: move it together with the folder.

    Examples:
      osora gallery samples
      osora gallery serve --output results.html
    """
    require_there(settings.folder)
    from opensora_cli.server.results import write_gallery

    call.show(write_gallery(settings, reporter=call.reporter))


def presets(given: Layer, call: Call) -> None:
    """List the presets with size, needs, and the GPUs that they fit on.

    A preset is the --config of osora generate.

    Examples:
      osora presets
      osora presets --json
    """
    call.show(describe_presets())


_GALLERY_ROWS = {
    "FOLDER": Option("folder"),
    "--output": Option("output", metavar="FILE", short="-o"),
}
SHOW = make_command(show, {"FILE": Option("path")}, settings=InspectSettings)
GALLERY = make_command(gallery, _GALLERY_ROWS)
PRESETS = make_command(presets, {})
