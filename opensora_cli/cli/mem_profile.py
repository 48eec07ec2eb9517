"""`osora mem-profile`: memory of a generation or a training, predicted and measured."""

import os

from opensora_cli.cli.command import ON, Call, config_row, make_command, set_row
from opensora_cli.core import device_names
from opensora_cli.settings.flags import Option
from opensora_cli.settings.tools import MemProfileSettings, profiled_settings, require_profile

_FILES = "Files"


def mem_profile(settings: MemProfileSettings, call: Call) -> None:
    """Show where the memory of a generation or a training goes, predicted and measured.

    Needs no weights: random weights of the same sizes take the same memory. Stages that do not fit are only predicted.

    Examples:
      osora mem-profile
      osora mem-profile --config demo_lora --compare --plot memory.png
      osora mem-profile --config 768px --json
      osora mem-profile --config stage1 --on 8xH100
    """
    machine = call.planned
    if machine is not None:
        call.refuse(("--device", "--compare", "--snapshot"), beside="--on, which measures nothing")
    what = profiled_settings(
        call.config,
        assignments=call.assignments,
        device=call.value("--device", str),
        gpus=call.value("--gpus", str),
        on=machine,
        environment=os.environ,
        report=call.reporter.note,
    )
    require_profile(settings, what)
    with call.loading():
        from opensora_cli.engine.mem_profile.profile import mem_profile as profile

    call.show(profile(what, settings, reporter=call.reporter, on=machine))


_ROWS = {
    "--config": config_row("Recipe (training), preset, or file of settings.", "train", "generate")._replace(
        default="the demo, generating"
    ),
    "--set": set_row("Any setting of what is profiled."),
    "--device": Option(kind=str, metavar="DEVICE", help=device_names.HELP, default="auto"),
    "--gpus": Option(metavar="N", help="Predict for each of N devices of any machine; measure nothing."),
    "--on": ON._replace(help="Predict for other GPUs, as in 8xH100 or 12GiB; measure nothing."),
    "--memory-limit": Option("memory_limit", metavar="SIZE"),
    "--snapshot": Option("snapshot", _FILES, metavar="FILE"),
    "--plot": Option("plot", _FILES, metavar="FILE"),
    "--overwrite": Option("overwrite", _FILES),
}
COMMAND = make_command(mem_profile, _ROWS)
