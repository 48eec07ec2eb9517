"""`osora train`: from a recipe to trained weights."""

import os
from pathlib import Path

from opensora_cli.cli.command import CONFIG, DEVICES, ON, SET, Call, device_rows, make_command
from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.components.weights import warn_of_missing
from opensora_cli.engine.encode.inputs import require_tables
from opensora_cli.engine.listings import describe_recipes
from opensora_cli.engine.train.early import check_output, refuse_early, warn_of_missing_inputs
from opensora_cli.settings.flags import MACHINE, Option
from opensora_cli.settings.hardware import PlannedMachine
from opensora_cli.settings.layers import ConfigFile, Layer, collect_overrides
from opensora_cli.settings.train import TrainSettings, load_train_settings

_CHECKPOINTS, _CHECKS = "Checkpoints", "Checks"


def train(given: Layer, call: Call) -> None:
    """Train a part of the video model: the transformer, an adapter for it, or an autoencoder.

    Examples:
      osora train --config demo_lora
      osora train --config demo_lora --resume
      osora train --list
      osora train --new clips
      osora train --config demo_lora --gpus 4 --set strategy=zero2
      osora train --plot curves.png runs/first runs/second
    """
    if "--list" in call.given:
        call.refuse(_ROWS.keys() - {"--list"}, beside="--list, which prints the recipes alone")
        call.show(describe_recipes())
    elif (plot := call.value("--plot", Path)) is not None:
        others = _ROWS.keys() - {"RUN", "--plot", "--overwrite"}
        call.refuse(others, beside="--plot, which trains nothing")
        runs = call.value("RUN", list)
        if runs is None:
            raise RequestError("--plot needs the folders of runs", hint=f"osora train --plot {plot} RUN")
        from opensora_cli.engine.train.curves import plot_runs

        call.show(plot_runs(runs, plot, overwrite="--overwrite" in call.given))
    elif "RUN" in call.given:
        call.require("--plot", beside="RUN")
    elif (folder := call.value("--new", str)) is not None:
        others = _ROWS.keys() - {"--new", "--config"}
        call.refuse(others, beside="--new, which trains nothing", hint="put it into the file")
        with call.loading():
            from opensora_cli.engine.data.check import write_recipe

        call.show(write_recipe(folder, call.config or Path("demo_lora"), reporter=call.reporter))
    elif "--check-data" in call.given:
        others = {"--resume", "--resume-from", "--overwrite", "--dry-run", "--on"}
        call.refuse(others, beside="--check-data, which trains nothing")
        _check_data(load_settings(given, call), call)
    else:
        _run(given, call)


def load_settings(
    given: Layer, call: Call, *, config: ConfigFile | None = None, machine: PlannedMachine | None = None
) -> TrainSettings:
    """Return the settings of a training run, with the GPUs of a planned machine."""
    overrides = collect_overrides(TrainSettings, given, call.assignments)
    return load_train_settings(
        config=config or call.config,
        overrides=overrides if machine is None else {**machine.counts(overrides), **overrides},
        environment=os.environ,
        saved=call.value("--from", Path),
        report=call.reporter.note,
    )


def _check_data(settings: TrainSettings, call: Call) -> None:
    require_tables(settings)
    with call.loading():
        from opensora_cli.engine.data.check import check_data

    call.show(check_data(settings, reporter=call.reporter))


def _run(given: Layer, call: Call) -> None:
    dry_run, overwrite = "--dry-run" in call.given, "--overwrite" in call.given
    call.require("--dry-run", beside="--on")
    machine = call.planned
    settings = load_settings(given, call, machine=machine)
    resume = call.value("--resume-from", Path) or "--resume" in call.given
    if not dry_run:
        refuse_early(settings, resume=resume, overwrite=overwrite)
    elif resume:
        check_output(settings, resume=resume, overwrite=overwrite)  # the plan names the checkpoint
    with call.loading():
        from opensora_cli.engine.train import run
        from opensora_cli.engine.train.plan import plan_training, with_memory

    if dry_run:
        plan = plan_training(settings, resume=resume, overwrite=overwrite, machine=machine)
        if call.is_main:
            if machine is None:
                warn_of_missing(lambda: check_output(settings, resume=resume, overwrite=overwrite), call.reporter)
                warn_of_missing_inputs(settings, call.reporter)
                warn_of_missing(lambda: run.require_same_cache(settings), call.reporter)
            plan = with_memory(plan, reporter=call.reporter, machine=machine)
        call.show(plan)
        return
    result = run.train(
        settings,
        resume=resume,
        overwrite=overwrite,
        reporter=call.reporter,
        context=call.context,
        rank_flags=call.again("--resume", "--resume-from", "--overwrite"),
    )
    call.show(result)


CONFIG_HELP = "Recipe of osora (see --list), YAML file of settings, or .py configuration of the reference."
_NEW = "Write DIR.yaml: a recipe that extends --config (demo_lora), with buckets for the clips of DIR."
SET_HELP = "Set any setting, as in loop.steps=400; wins over FILE."
_ROWS = {
    "RUN": Option(kind=list[str], help="With --plot: folder of a run."),
    "--config": CONFIG._replace(help=CONFIG_HELP, is_common=True),
    "--set": SET._replace(help=SET_HELP, is_common=True),
    "--from": Option(kind=Path, metavar="FILE", help="settings.json of an earlier run, in place of --config."),
    "--new": Option("", "", _NEW, "DIR", is_common=True),
    "--list": Option(kind=bool, help="List the recipes of osora and exit.", is_common=True),
    "--resume": Option("", _CHECKPOINTS, "Continue from the newest checkpoint.", kind=bool, is_common=True),
    "--resume-from": Option("", _CHECKPOINTS, "Continue from this checkpoint instead of the newest.", "FOLDER", Path),
    "--overwrite": Option("", _CHECKPOINTS, "Start again, and replace the earlier run.", kind=bool, is_common=True),
    "--check-data": Option("", _CHECKS, "Print buckets, batches and bad rows only.", kind=bool, is_common=True),
    "--dry-run": Option("", _CHECKS, "Print the plan and the memory of a rank.", kind=bool, is_common=True),
    "--on": ON._replace(panel=_CHECKS),
    "--plot": Option("", _CHECKS, "Draw the curves of each RUN: .png, .svg or .pdf; train nothing.", "FILE", Path),
    **device_rows(),
    "--gpus": Option("parallel.gpus", MACHINE, "GPUs that share the work, or processes on a CPU.", "N", is_common=True),
    "--devices": DEVICES,
    "--attention": Option("train_mmdit.attention", MACHINE, "Attention backend; auto is the first that works."),
}
COMMAND = make_command(train, _ROWS, settings=TrainSettings, on_ranks=True)
