"""Charts as files. matplotlib is an extra and imported only for a chart."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.core.exceptions import missing_library
from opensora_cli.core.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(*, width: float = 10.0, height: float = 5.0) -> "Figure":
    """Return an empty figure, with its size in inches, apart from windows and the global state of matplotlib.

    Raises HardwareError if matplotlib is missing. Call it before long work, too, to find out early.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_library("a chart needs matplotlib", extra="plot") from error
    return Figure(figsize=(width, height), layout="constrained")


def write_figure(figure: "Figure", path: str | os.PathLike[str], *, replace: bool = False) -> None:
    """Write a figure, whole or not at all, in the format of its ending: .png, .svg or .pdf.

    Missing folders are made. Raises OutputError if it cannot be written, or exists without `replace`.
    """
    import matplotlib

    as_text = matplotlib.rc_context({"svg.fonttype": "none"})
    with atomic_path(path, replace=replace) as temporary, as_text:
        figure.savefig(temporary, format=Path(path).suffix.lower().lstrip("."), dpi=150)
