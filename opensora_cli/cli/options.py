"""Rows of options that several commands have.

An option that is not given is None, False or empty, so that presets and files decide.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from opensora_cli.settings.flags import MACHINE, OUTPUT, Option

_SETTINGS_FILES = (".json", ".py", ".yaml", ".yml")


def completed_settings(*kinds: str) -> Callable[[str], list[str]]:
    """Return the shell completion of `--config`: packaged settings of these kinds by name, folders, and files."""

    def complete(incomplete: str) -> list[str]:
        from opensora_cli.settings.files import list_presets

        begun = Path(incomplete)
        inside = not incomplete or incomplete.endswith(("/", os.sep))
        folder, start = (begun, "") if inside else (begun.parent, begun.name)
        paths = sorted(
            path for path in folder.glob("*") if path.name.startswith(start) and not path.name.startswith(".")
        )
        shown = [f"{path}/" if path.is_dir() else str(path) for path in paths if _holds_settings(path)]
        names = [name for kind in kinds for name in list_presets(kind) if name.startswith(incomplete)]
        return [*dict.fromkeys(names), *shown]

    return complete


def _holds_settings(path: Path) -> bool:
    return path.is_dir() or path.suffix in _SETTINGS_FILES


def config_row(about: str, *kinds: str) -> Option:
    """Return the row of `--config`, completed with packaged settings of these kinds."""
    return Option(kind=Path, metavar="NAME|FILE", help=about, complete=completed_settings(*kinds))


PRINTED = {
    "--json": Option(kind=bool, panel=OUTPUT, help="Print one JSON document to stdout."),
    "--quiet": Option(kind=bool, panel=OUTPUT, help="Print errors only.", short="-q"),
}
"""How a command prints."""

ON = Option(
    kind=str, metavar="NxGPU|FILE", help="With --dry-run: plan for other GPUs, as in 8xH100, and predict the time."
)


def rank_words(values: Mapping[str, object]) -> list[str]:
    """Return options as words of a rank's command line, without those that are None or off."""
    words: list[str] = []
    for option, value in values.items():
        if isinstance(value, bool):
            words += [option] if value else []
        elif value is not None:
            words += [f"{option}={each}" for each in (value if isinstance(value, list | tuple) else [value])]
    return words


def device_rows(prefix: str = "") -> dict[str, Option]:
    """Return the rows of device and threads, whose keys begin with `prefix`."""
    return {
        "--device": Option(f"{prefix}device", MACHINE, "auto, cpu, cuda or cuda:N.", "DEVICE"),
        "--threads": Option(f"{prefix}threads", MACHINE, "CPU threads.", "N", default="by work, cores and load"),
    }


RANKS = {
    "--gpus": Option(
        "parallel.gpus", MACHINE, "GPUs of this machine that share the work; with --device cpu processes.", "N"
    ),
    "--devices": Option("parallel.devices", MACHINE, "GPUs to use, as in 0,2.", "LIST", str, default="the first ones"),
}
"""Devices of a command with several ranks."""
