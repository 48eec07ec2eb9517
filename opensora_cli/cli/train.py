"""`osora train`: from a recipe to trained weights."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.cli import options
from opensora_cli.cli.call import Call
from opensora_cli.cli.command import Command
from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.flags import MACHINE, Option

if TYPE_CHECKING:
    from opensora_cli.settings.hardware import PlannedMachine
    from opensora_cli.settings.layers import Layer
    from opensora_cli.settings.train import TrainSettings

_CHECKPOINTS, _CHECKS = "Checkpoints", "Checks"


def train(given: "Layer", call: Call) -> None:
    """Train a part of the video model: the transformer, an adapter for it, or an autoencoder.

    Examples:

      osora train --config configs/train/demo_lora.yaml

      osora train --config configs/train/demo_lora.yaml --resume

      osora train --list

      osora train --new clips

      osora train --config demo_lora --gpus 4 --set strategy=zero2
    """
    if "--list" in call.given:
        call.refuse(ROWS.keys() - {"--list"}, beside="--list, which prints the recipes alone")
        from opensora_cli.engine.listings import describe_recipes

        call.show(describe_recipes())
    elif (folder := call.value("--new", str)) is not None:
        others = ROWS.keys() - {"--new", "--config"}
        call.refuse(others, beside="--new, which trains nothing", hint="put it into the file")
        with call.loading():
            from opensora_cli.engine.data.new_recipe import write_recipe

        call.show(write_recipe(folder, call.config or Path("demo_lora"), reporter=call.reporter))
    elif "--check-data" in call.given:
        others = {"--resume", "--resume-from", "--allow-older", "--overwrite", "--dry-run", "--on"}
        call.refuse(others, beside="--check-data, which trains nothing")
        _check_data(load_settings(given, call), call)
    else:
        _run(given, call)


def load_settings(given: "Layer", call: Call, *, machine: "PlannedMachine | None" = None) -> "TrainSettings":
    """Return the settings of a training run, with the GPUs of a planned machine."""
    from opensora_cli.settings.layers import collect_overrides
    from opensora_cli.settings.train import TrainSettings, load_train_settings

    overrides = collect_overrides(TrainSettings, given, call.assignments)
    return load_train_settings(
        config=call.config,
        overrides=overrides if machine is None else {**machine.counts(overrides), **overrides},
        environment=os.environ,
        saved=call.value("--from", Path),
        report=call.reporter.note,
    )


def _check_data(settings: "TrainSettings", call: Call) -> None:
    from opensora_cli.engine.encode.inputs import require_tables

    require_tables(settings)
    with call.loading():
        from opensora_cli.engine.data.check import check_data

    report = check_data(settings, reporter=call.reporter)
    call.show(report)
    report.require_batches()


def _run(given: "Layer", call: Call) -> None:
    dry_run, overwrite = "--dry-run" in call.given, "--overwrite" in call.given
    folder, allow_older = call.value("--resume-from", Path), "--allow-older" in call.given
    if allow_older and folder is not None:
        raise RequestError("--allow-older has no effect with --resume-from, which names the checkpoint: drop it")
    call.require("--dry-run", beside="--on")
    call.require("--resume", beside="--allow-older")
    machine = None
    if (name := call.value("--on", str)) is not None:
        from opensora_cli.settings.hardware import read_machine

        machine = read_machine(name)
    settings = load_settings(given, call, machine=machine)

    from opensora_cli.core.ranks import find_context
    from opensora_cli.engine.train.early import Resume, refuse_early, warn_of_missing_inputs

    resumes = "--resume" in call.given or folder is not None
    resume = Resume(folder=folder, allow_older=allow_older) if resumes else None
    if not dry_run:
        refuse_early(settings, resume=resume, overwrite=overwrite)
    context = find_context(os.environ)
    with call.loading():
        from opensora_cli.engine.train import run
        from opensora_cli.engine.train.plan import plan_training, with_memory

    if dry_run:
        plan = plan_training(settings, resume=resume, overwrite=overwrite, machine=machine)
        if context is None or context.is_main:
            if machine is None:
                warn_of_missing_inputs(settings, call.reporter)
            plan = with_memory(plan, reporter=call.reporter, machine=machine)
            call.show(plan)
        plan.require_fit()
        return
    result = run.train(
        settings,
        resume=resume,
        overwrite=overwrite,
        reporter=call.reporter,
        context=context,
        rank_flags=call.again("--resume", "--resume-from", "--allow-older", "--overwrite"),
    )
    call.show(result, context=context)


CONFIG_HELP = "Recipe of osora (see --list), YAML file of settings, or .py configuration of the reference."
SET_HELP = "Set any setting, as in loop.steps=400; wins over FILE."
ROWS = {
    "--config": options.config_row(CONFIG_HELP, "train")._replace(is_common=True),
    "--set": options.set_row(SET_HELP)._replace(is_common=True),
    "--from": Option(kind=Path, metavar="FILE", help="settings.json of an earlier run, in place of --config."),
    "--new": Option(
        kind=str,
        metavar="DIR",
        help="Write DIR.yaml, a recipe whose buckets fit the clips of a folder; --config names the recipe that it "
        "extends.",
        default="demo_lora",
        is_common=True,
    ),
    "--list": Option(kind=bool, help="List the recipes of osora and exit.", is_common=True),
    "--resume": Option(
        kind=bool, panel=_CHECKPOINTS, help="Continue from the newest checkpoint of the output.", is_common=True
    ),
    "--resume-from": Option(
        kind=Path, panel=_CHECKPOINTS, metavar="FOLDER", help="Continue from this checkpoint instead of the newest."
    ),
    "--allow-older": Option(
        kind=bool, panel=_CHECKPOINTS, help="With --resume: if the newest checkpoint is broken, use the one before."
    ),
    "--overwrite": Option(
        kind=bool,
        panel=_CHECKPOINTS,
        help="Start again, and replace the earlier run in the output folder.",
        is_common=True,
    ),
    "--check-data": Option(
        kind=bool,
        panel=_CHECKS,
        help="Print buckets, batches and bad rows, and train nothing; exit with 3 if a bucket is empty.",
        is_common=True,
    ),
    "--dry-run": Option(
        kind=bool, panel=_CHECKS, help="Print the plan and the memory of each rank; do nothing.", is_common=True
    ),
    "--on": options.ON._replace(panel=_CHECKS),
    **options.device_rows(),
    "--gpus": Option(
        "parallel.gpus",
        MACHINE,
        "GPUs of this machine that share the work; with --device cpu processes.",
        "N",
        is_common=True,
    ),
    "--devices": options.DEVICES,
    "--attention": Option(
        "train_mmdit.attention", MACHINE, "Attention backend; auto is the first that works.", default="auto"
    ),
}
COMMAND = Command("train", train, ROWS, settings="train:TrainSettings", layered=True, on_ranks=True)
