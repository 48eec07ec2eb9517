"""`osora mem-profile`: memory of a generation or a training, predicted and measured."""

from opensora_cli.cli import train
from opensora_cli.cli.command import CONFIG, ON, SET, Call, make_command
from opensora_cli.core import device_names
from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.flags import Option
from opensora_cli.settings.layers import Given, open_config
from opensora_cli.settings.load import GenerateRequest, generate_request
from opensora_cli.settings.tools import MemProfileSettings
from opensora_cli.settings.train import TrainSettings

_FILES = "Files"


def mem_profile(settings: MemProfileSettings, call: Call) -> None:
    """Show where the memory of a generation or a training goes, predicted and measured.

    Needs no weights: random weights of the same sizes take the same memory. Stages that do not fit are only predicted.

    Examples:
      osora mem-profile
      osora mem-profile --config demo_lora --plot memory.png
      osora mem-profile --config 768px --json
      osora mem-profile --config stage1 --on 8xH100
    """
    if "--on" in call.given:
        call.refuse(("--device", "--compare", "--snapshot"), beside="--on, which measures nothing")
    what = _profiled(call)
    if settings.adaptive_batch and not isinstance(what, TrainSettings):
        raise RequestError(
            "adaptive_batch=true needs a training recipe: a generation computes one clip at a time",
            hint="name a recipe, as in --config demo_lora",
        )
    if isinstance(what, TrainSettings):
        call.refuse(("--compare", "--snapshot"), beside="a training recipe", hint="name a preset, as in --config 256px")
    with call.loading():
        from opensora_cli.engine.mem_profile.profile import mem_profile as profile

    call.show(profile(what, settings, reporter=call.reporter, on=call.planned))


def _profiled(call: Call) -> GenerateRequest | TrainSettings:
    device, gpus = call.value("--device", str), call.value("--gpus", str)
    given = {} if gpus is None else {"parallel.gpus": Given(gpus, "--gpus")}
    file = None if call.config is None else open_config(call.config, "train", "generate")
    if file is not None and file.is_for_training:
        if device not in (None, "auto", "cpu"):
            raise RequestError(f"--device {device} is not possible: training is profiled on the CPU", hint="drop it")
        return train.load_settings(given, call, config=file, machine=call.planned)
    if device is not None:
        given["runtime.device"] = Given(device, "--device")
    usual = {"runtime.model_choice": Given(DEMO, "mem-profile")} if file is None and call.planned is None else {}
    return generate_request(
        given, below=usual, assignments=call.assignments, config=file, on=call.planned, any_prompt=True
    )


_ROWS = {
    "--config": CONFIG._replace(help="Recipe (training), preset, or file of settings.", default="the demo, generating"),
    "--set": SET._replace(help="Any setting of the generation or training."),
    "--device": Option(kind=str, metavar="DEVICE", help=device_names.HELP, default="auto"),
    "--gpus": Option(metavar="N", help="Predict for each of N devices of any machine; measure nothing."),
    "--on": ON._replace(help="Predict for other GPUs, as in 8xH100 or 12GiB; measure nothing."),
    "--memory-limit": Option("memory_limit", metavar="SIZE"),
    "--snapshot": Option("snapshot", _FILES, metavar="FILE"),
    "--plot": Option("plot", _FILES, metavar="FILE"),
    "--overwrite": Option("overwrite", _FILES),
}
COMMAND = make_command(mem_profile, _ROWS)
