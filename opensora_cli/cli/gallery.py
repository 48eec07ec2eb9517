"""`osora gallery`: one HTML page of a folder of results."""

from opensora_cli.cli.call import Call
from opensora_cli.cli.command import make_command
from opensora_cli.core.reading import require_there
from opensora_cli.settings.flags import Option
from opensora_cli.settings.serve import GallerySettings


def gallery(settings: GallerySettings, call: Call) -> None:
    """Write one HTML page of a folder of results, with posters, settings and a filter by words.

    Videos play under the pointer. The page names them by relative paths: move it together with the folder.

    Examples:

      osora gallery samples

      osora gallery serve --output results.html
    """
    require_there(settings.folder)
    from opensora_cli.server.gallery import write_gallery

    call.show(write_gallery(settings, reporter=call.reporter))


_ROWS = {
    "FOLDER": Option("folder"),
    "--output": Option("output", metavar="FILE", short="-o"),
    "--overwrite": Option("overwrite"),
}
COMMAND = make_command("gallery", gallery, _ROWS, settings=GallerySettings)
