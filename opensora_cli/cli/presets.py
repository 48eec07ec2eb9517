"""`osora presets`: presets of `osora generate`, their needs, and the GPUs that they fit on."""

from typing import TYPE_CHECKING

from opensora_cli.cli.call import Call
from opensora_cli.cli.command import Command

if TYPE_CHECKING:
    from opensora_cli.settings.layers import Layer


def presets(given: "Layer", call: Call) -> None:
    """List the presets with size, needs, and the GPUs that they fit on.

    A preset is the --config of osora generate.

    Examples:

      osora presets

      osora presets --json
    """
    from opensora_cli.engine.listings import describe_presets

    call.show(describe_presets())


COMMAND = Command("presets", presets, {}, layered=True)
