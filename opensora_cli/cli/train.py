"""`osora train`: from a recipe to trained weights."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opensora_cli.cli import errors, options, output
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.files import require_there

if TYPE_CHECKING:
    from opensora_cli.settings.hardware import PlannedMachine
    from opensora_cli.settings.train import TrainSettings

RECIPES_SCHEMA = "osora.recipes/1"

Recipe = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="NAME|FILE",
        help="Recipe that comes with osora (see --list), YAML file of settings, or .py configuration of the reference.",
        autocompletion=options.completed_settings("train"),
    ),
]
SavedSettings = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="settings.json of an earlier run, in place of --config."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as in loop.steps=400; wins over FILE. Repeatable."),
]
ResumeNewest = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint of the output.")]
ResumeFrom = Annotated[
    Path | None,
    typer.Option("--resume-from", metavar="FOLDER", help="Continue from this checkpoint instead of the newest."),
]
AllowOlder = Annotated[
    bool, typer.Option("--allow-older", help="With --resume: if the newest checkpoint is broken, use the one before.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start again, and replace the earlier run in the output folder.")
]
CheckData = Annotated[
    bool,
    typer.Option(
        "--check-data", help="Print buckets, batches and bad rows, and train nothing; exit 3 if any is empty."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be trained, and the memory of each rank; do nothing.")
]
New = Annotated[
    str | None,
    typer.Option(
        "--new",
        metavar="DIR",
        help="Write DIR.yaml, a recipe whose buckets fit the clips of a folder; --config: what it extends. "
        "Default: demo_lora.",
    ),
]
ListRecipes = Annotated[bool, typer.Option("--list", help="List the recipes that come with osora and exit.")]


def train(
    config: Recipe = None,
    set_: Assignments = None,
    from_: SavedSettings = None,
    resume: ResumeNewest = False,
    resume_from: ResumeFrom = None,
    allow_older: AllowOlder = False,
    overwrite: Overwrite = False,
    check_data: CheckData = False,
    dry_run: DryRun = False,
    on: options.On = None,
    new: New = None,
    list_: ListRecipes = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
    device: options.Device = None,
    threads: options.Threads = None,
    gpus: options.Gpus = None,
    devices: options.Devices = None,
    attention: options.Attention = None,
) -> None:
    """Train a part of the video model: the transformer, an adapter for it, an autoencoder or the text encoders.

    Examples:

      osora train --config configs/train/demo_vae.yaml

      osora train --config configs/train/demo_vae.yaml --resume

      osora train --list

      osora train --new clips

      osora train --config demo_lora --gpus 4 --set strategy=zero2
    """
    flags = {
        "device": ("--device", device),
        "threads": ("--threads", threads),
        "parallel.gpus": ("--gpus", gpus),
        "parallel.devices": ("--devices", devices),
        "train_mmdit.attention": ("--attention", attention),
    }
    modes = (
        ("--resume", resume),
        ("--resume-from", resume_from),
        ("--overwrite", overwrite),
        ("--dry-run", dry_run),
        ("--on", on),
    )
    others = (("--set", set_), ("--from", from_), *modes, ("--allow-older", allow_older), ("--check-data", check_data))
    used = [flag for flag, value in flags.values() if value is not None] + [flag for flag, value in others if value]
    with errors.interruptible():
        if list_:
            used += [flag for flag, value in (("--config", config), ("--new", new)) if value is not None]
            if used:
                raise RequestError(f"{used[0]} has no effect with --list, which prints the recipes alone: drop it")
            _print_recipes(as_json=json_)
            return
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.layers import collect_overrides
        from opensora_cli.settings.train import TrainSettings, load_train_settings

        if new is not None:
            if used:
                raise RequestError(f"{used[0]} has no effect with --new, which trains nothing: put it into the file")
            _write_recipe(new, config or Path("demo_lora"), as_json=json_, quiet=quiet)
            return
        if on is not None and not (dry_run or check_data):
            raise RequestError(f"--on {on} has no effect without --dry-run, which plans for it: give both, or none")
        given = {key: Given(value, flag) for key, (flag, value) in flags.items() if value is not None}
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
            for flag, value in modes:
                if value:
                    raise RequestError(f"{flag} has no effect with --check-data, which trains nothing: drop it")
            _check_data(settings, as_json=json_, quiet=quiet)
            return
        _run(
            settings,
            resumes=resume or resume_from is not None,
            resume_from=resume_from,
            allow_older=allow_older,
            overwrite=overwrite,
            dry_run=dry_run,
            machine=machine,
            as_json=json_,
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
        rank_flags=_rank_flags(
            ("--resume", resumes and resume_from is None),
            ("--resume-from", resume_from),
            ("--allow-older", allow_older),
            ("--overwrite", overwrite),
            ("--json", as_json),
            ("--quiet", quiet),
        ),
    )
    if result is not None and is_main:
        output.print_result(result, as_json=as_json)


def _rank_flags(*flags: tuple[str, bool | Path | None]) -> list[str]:
    """Return the flags that are on, as the ranks get them."""
    words = []
    for flag, value in flags:
        if isinstance(value, Path):
            words += [flag, str(value)]
        elif value:
            words.append(flag)
    return words
