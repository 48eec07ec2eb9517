"""`osora presets`: presets of `osora generate`, their needs, and the GPUs that they fit on."""

from opensora_cli.cli.call import Call
from opensora_cli.cli.command import make_command
from opensora_cli.engine.listings import describe_presets
from opensora_cli.settings.layers import Layer


def presets(given: Layer, call: Call) -> None:
    """List the presets with size, needs, and the GPUs that they fit on.

    A preset is the --config of osora generate.

    Examples:

      osora presets

      osora presets --json
    """
    call.show(describe_presets())


COMMAND = make_command("presets", presets, {}, layered=True)
