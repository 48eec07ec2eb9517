"""Rows of options that several commands have, and names of options from elsewhere.

An option that is not given is None, False or empty, so that presets and files decide.
"""

import glob
import os
from collections.abc import Callable
from pathlib import Path

from opensora_cli.core import device_names
from opensora_cli.settings.flags import MACHINE, OUTPUT, Option

_SETTINGS_FILES = (".json", ".py", ".yaml", ".yml")

RENAMED = {"offload_model": "--offload", "is_causal_vae": "--set", "ckpt_path": "--weights"}
"""Options of the reference implementation's scripts that the tables of `settings.reference` do not name."""

REPLACED = {
    "--profile": "osora bench-generate",
    "--profile-runs": "osora bench-generate --repeats N",
    **dict.fromkeys(("--prompt", "--prompt-text"), 'the text alone, as in osora generate "raining, sea"'),
}
"""Options of earlier versions and of the reference, and what took their place."""


def completed_settings(*kinds: str) -> Callable[[str], list[str]]:
    """Return the shell completion of `--config`: packaged settings of these kinds by name, folders, and files."""

    def complete(incomplete: str) -> list[str]:
        from opensora_cli.settings.files import list_presets

        names = [name for kind in kinds for name in list_presets(kind) if name.startswith(incomplete)]
        paths = [
            f"{path}/" if os.path.isdir(path) else path for path in sorted(glob.glob(f"{glob.escape(incomplete)}*"))
        ]
        return [*dict.fromkeys(names), *(path for path in paths if path.endswith(("/", *_SETTINGS_FILES)))]

    return complete


def config_row(about: str, *kinds: str) -> Option:
    """Return the row of `--config`, completed with packaged settings of these kinds."""
    return Option(kind=Path, metavar="NAME|FILE", help=about, complete=completed_settings(*kinds))


def set_row(about: str) -> Option:
    """Return the row of `--set`."""
    return Option(kind=list[str], metavar="KEY=VALUE", help=f"{about} Repeatable.")


def device_rows(prefix: str = "") -> dict[str, Option]:
    """Return the rows of device and threads, whose keys begin with `prefix`."""
    return {
        "--device": Option(f"{prefix}device", MACHINE, device_names.HELP, "DEVICE"),
        "--threads": Option(f"{prefix}threads", MACHINE, "CPU threads.", "N", default="by work and cores"),
    }


PRINTED = {
    "--json": Option(kind=bool, panel=OUTPUT, help="Print one JSON document to stdout."),
    "--quiet": Option(kind=bool, panel=OUTPUT, help="Print errors only.", short="-q"),
}
"""Options of printing, which every command has."""

ON = Option(kind=str, metavar="NxGPU|SIZE|FILE", help="With --dry-run: plan for other GPUs, as in 8xH100 or 12GiB.")
DEVICES = Option("parallel.devices", MACHINE, "GPUs to use, as in 0,2.", "LIST", str, default="the first ones")
