"""`osora train`: from a recipe to trained weights."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.cli import errors, options, output
from opensora_cli.cli.command import Command
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.files import require_there
from opensora_cli.settings.flags import MACHINE, Option

if TYPE_CHECKING:
    from opensora_cli.settings.hardware import PlannedMachine
    from opensora_cli.settings.layers import Layer
    from opensora_cli.settings.train import TrainSettings

RECIPES_SCHEMA = "osora.recipes/1"

_MODES = ("--resume", "--resume-from", "--overwrite", "--dry-run", "--on")
"""Options that say how to train."""


def train(
    given: "Layer",
    *,
    config: Path | None,
    set_: list[str] | None,
    from_: Path | None,
    resume: bool,
    resume_from: Path | None,
    allow_older: bool,
    overwrite: bool,
    check_data: bool,
    dry_run: bool,
    on: str | None,
    new: str | None,
    list_: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Train a part of the video model: the transformer, an adapter for it, an autoencoder or the text encoders.

    Examples:

      osora train --config configs/train/demo_vae.yaml

      osora train --config configs/train/demo_vae.yaml --resume

      osora train --list

      osora train --new clips

      osora train --config demo_lora --gpus 4 --set strategy=zero2
    """
    values = {
        **{"--config": config, "--new": new, "--set": set_, "--from": from_, "--resume": resume, "--on": on},
        **{"--resume-from": resume_from, "--allow-older": allow_older, "--overwrite": overwrite},
        **{"--check-data": check_data, "--dry-run": dry_run},
    }
    used = [*(at.source for at in given.values()), *(label for label, value in values.items() if value)]
    if list_:
        if used:
            raise RequestError(f"{used[0]} has no effect with --list, which prints the recipes alone: drop it")
        _print_recipes(as_json=json)
        return
    if new is not None:
        if others := [label for label in used if label not in ("--config", "--new")]:
            raise RequestError(f"{others[0]} has no effect with --new, which trains nothing: put it into the file")
        _write_recipe(new, config or Path("demo_lora"), as_json=json, quiet=quiet)
        return
    if on is not None and not (dry_run or check_data):
        raise RequestError(f"--on {on} has no effect without --dry-run, which plans for it: give both, or none")
    from opensora_cli.settings.layers import collect_overrides
    from opensora_cli.settings.train import TrainSettings, load_train_settings

    overrides = collect_overrides(TrainSettings, given, set_ or [])
    machine = None
    if on is not None:
        from opensora_cli.settings.hardware import read_machine

        machine = read_machine(on)
        overrides = {**machine.counts(overrides), **overrides}
    settings = load_train_settings(
        config=config,
        overrides=overrides,
        environment=os.environ,
        saved=from_,
        report=output.make_reporter(quiet=quiet).note,
    )
    if allow_older and resume_from is not None:
        raise RequestError("--allow-older has no effect with --resume-from, which names the checkpoint: drop it")
    if allow_older and not resume:
        raise RequestError("--allow-older has no effect without --resume: give both, or --resume-from FOLDER")
    if check_data:
        if mode := next((label for label in used if label in _MODES), None):
            raise RequestError(f"{mode} has no effect with --check-data, which trains nothing: drop it")
        _check_data(settings, as_json=json, quiet=quiet)
        return
    _run(
        settings,
        resumes=resume or resume_from is not None,
        resume_from=resume_from,
        allow_older=allow_older,
        overwrite=overwrite,
        dry_run=dry_run,
        machine=machine,
        as_json=json,
        quiet=quiet,
    )


def _print_recipes(*, as_json: bool) -> None:
    from opensora_cli.settings.files import describe_preset, list_presets, preset_path

    recipes = {name: describe_preset("train", name) for name in list_presets("train")}
    if as_json:
        documents = [
            {"name": name, "description": text, "file": str(preset_path(name, "train"))}
            for name, text in recipes.items()
        ]
        output.print_json({"schema": RECIPES_SCHEMA, "recipes": documents})
        return
    width = max(map(len, recipes))
    output.print_lines([f"{name:{width}}  {text}" for name, text in recipes.items()])


def _write_recipe(folder: str, base: Path, *, as_json: bool, quiet: bool) -> None:
    with errors.uninterrupted():
        from opensora_cli.engine.data.new_recipe import write_recipe

    output.print_result(write_recipe(folder, base, reporter=output.make_reporter(quiet=quiet)), as_json=as_json)


def _check_data(settings: "TrainSettings", *, as_json: bool, quiet: bool) -> None:
    if settings.data.table is not None:
        require_there(settings.data.table)
    with errors.uninterrupted():
        from opensora_cli.engine.data.check import check_data

    report = check_data(settings, reporter=output.make_reporter(quiet=quiet))
    output.print_result(report, as_json=as_json)
    report.require_batches()


def _run(
    settings: "TrainSettings",
    *,
    resumes: bool,
    resume_from: Path | None,
    allow_older: bool,
    overwrite: bool,
    dry_run: bool,
    machine: "PlannedMachine | None",
    as_json: bool,
    quiet: bool,
) -> None:
    from opensora_cli.core.ranks import find_context
    from opensora_cli.engine.train.early import Resume, refuse_early, warn_of_missing_inputs

    resume = Resume(folder=resume_from, allow_older=allow_older) if resumes else None
    if not dry_run:
        refuse_early(settings, resume=resume, overwrite=overwrite)
    context = find_context(os.environ)
    is_main = context is None or context.is_main
    reporter = output.make_reporter(quiet=quiet or not is_main)
    output.note_start(reporter)
    with errors.uninterrupted():
        from opensora_cli.engine.train import run
        from opensora_cli.engine.train.plan import plan_training, with_memory

    if dry_run:
        plan = plan_training(settings, resume=resume, overwrite=overwrite, machine=machine)
        if is_main:
            if machine is None:
                warn_of_missing_inputs(settings, reporter)
            plan = with_memory(plan, reporter=reporter, machine=machine)
            output.print_result(plan, as_json=as_json)
        plan.require_fit()
        return
    result = run.train(
        settings,
        resume=resume,
        overwrite=overwrite,
        reporter=reporter,
        context=context,
        rank_flags=options.rank_words(
            {
                "--resume": resumes and resume_from is None,
                "--resume-from": resume_from,
                "--allow-older": allow_older,
                "--overwrite": overwrite,
                "--json": as_json,
                "--quiet": quiet,
            }
        ),
    )
    if result is not None and is_main:
        output.print_result(result, as_json=as_json)


ROWS = {
    "--config": options.config_row(
        "Recipe of osora (see --list), YAML file of settings, or .py configuration of the reference.", "train"
    ),
    "--set": Option(
        kind=list[str], metavar="KEY=VALUE", help="Set any setting, as in loop.steps=400; wins over FILE. Repeatable."
    ),
    "--from": Option(kind=Path, metavar="FILE", help="settings.json of an earlier run, in place of --config."),
    "--resume": Option(kind=bool, help="Continue from the newest checkpoint of the output."),
    "--resume-from": Option(kind=Path, metavar="FOLDER", help="Continue from this checkpoint instead of the newest."),
    "--allow-older": Option(kind=bool, help="With --resume: if the newest checkpoint is broken, use the one before."),
    "--overwrite": Option(kind=bool, help="Start again, and replace the earlier run in the output folder."),
    "--check-data": Option(
        kind=bool, help="Print buckets, batches and bad rows, and train nothing; exit with 3 if a bucket is empty."
    ),
    "--dry-run": Option(kind=bool, help="Print the plan and the memory of each rank; do nothing."),
    "--on": options.ON,
    "--new": Option(
        kind=str,
        metavar="DIR",
        help="Write DIR.yaml, a recipe whose buckets fit the clips of a folder; --config names the recipe that it "
        "extends.",
        default="demo_lora",
    ),
    "--list": Option(kind=bool, help="List the recipes of osora and exit."),
    **options.device_rows(),
    **options.RANKS,
    "--attention": Option(
        "train_mmdit.attention", MACHINE, "Attention backend; auto is the first that works.", default="auto"
    ),
    **options.PRINTED,
}
COMMAND = Command("train", train, ROWS, settings="train:TrainSettings", layered=True)
