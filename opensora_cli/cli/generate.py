"""`osora generate`: from a prompt to a video."""

import os
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opensora_cli.cli import errors, options, output
from opensora_cli.cli.command import Command
from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.flags import FLAGS, MACHINE, OUTPUT, PROMPT, REFERENCE, SAMPLING, VIDEO, Option, option_of

if TYPE_CHECKING:
    from opensora_cli.settings.explain import Given
    from opensora_cli.settings.load import GenerateRequest

_PANELS = ("", PROMPT, VIDEO, REFERENCE, SAMPLING, MACHINE, OUTPUT)
_TABLE_ENDINGS = frozenset({".csv", ".jsonl", ".parquet", ".txt"})
_TEXT_ENDINGS = frozenset({".md", ".tsv"})


def generate(
    given: "dict[str, Given]",
    *,
    prompt: str | None,
    prompt_text: str | None,
    prompts: Path | None,
    shard: str | None,
    explore: int | None,
    explore_steps: int | None,
    dry_run: bool,
    on: str | None,
    config: Path | None,
    set_: list[str] | None,
    from_: Path | None,
    list_presets: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Make a video from a prompt, and from pictures or videos if given.

    Examples:

      osora generate "raining, sea"

      osora generate "the boat turns around" --ref boat.png --out boat.mp4

      osora generate --from samples/raining-sea_seed42.mp4 --seed 7
    """
    if list_presets:
        from opensora_cli.cli.presets import presets

        presets({}, json=json, quiet=quiet)
        return
    if prompt is not None and prompt_text is not None:
        raise RequestError(f"the prompt is given twice: drop {prompt!r}, or --prompt-text")
    if prompt is not None and (hint := _hint_of_file(prompt)) is not None:
        kind = "folder" if Path(prompt).is_dir() else "file"
        raise RequestError(
            f"{prompt} is a {kind}, and no prompt", hint=f"{hint}; --prompt-text {shlex.quote(prompt)} insists"
        )
    from opensora_cli.api.request import generate_request
    from opensora_cli.engine.show import continued
    from opensora_cli.settings.explain import Given

    for words, source in ((prompt, "PROMPT"), (prompt_text, "--prompt-text")):
        if words is not None:
            given["prompt"] = Given(words, source)
    sidecar = None if from_ is None else continued(from_, given)
    _refuse_combinations(given, prompts=prompts, shard=shard, explore=explore, explore_steps=explore_steps, on=on)
    if on is not None and not dry_run:
        raise RequestError(f"--on {on} has no effect without --dry-run, which plans for it: give both, or none")
    if explore is not None:
        given["output.explore"] = Given(True, "--explore")
        given["sampling.num_samples"] = Given(explore, "--explore")
        given["sampling.stop_at"] = Given(explore_steps, "--explore-steps")
    request = generate_request(given, assignments=set_ or [], sidecar=sidecar, config=config)
    if on is not None:
        from opensora_cli.settings.hardware import read_machine

        machine = read_machine(on)
        request = replace(request, on=machine, overrides={**machine.counts(request.overrides), **request.overrides})
    if prompts is not None:
        _run_rows(request, prompts, shard, sidecar=sidecar, dry_run=dry_run, as_json=json, quiet=quiet)
        return
    from opensora_cli.engine.generate.request import dry_run_named

    with nullcontext() if dry_run else dry_run_named(request):
        _run(request, dry_run=dry_run, as_json=json, quiet=quiet)


def _refuse_combinations(
    given: "Mapping[str, Given]",
    *,
    prompts: Path | None,
    shard: str | None,
    explore: int | None,
    explore_steps: int | None,
    on: str | None,
) -> None:
    """Refuse options that have no effect together."""
    if shard is not None and prompts is None:
        raise RequestError("--shard has no effect without --prompts: drop it")
    if (explore is None) is not (explore_steps is None):
        missing, there = ("--explore", "--explore-steps") if explore is None else ("--explore-steps", "--explore")
        raise RequestError(f"{there} needs {missing}: give both, or none")
    sources = {key: at.source for key, at in given.items()}
    if explore is not None:
        excluded = [sources.get(key) for key in ("from_latents", "resume", "sampling.stop_at", "sampling.num_samples")]
        if clash := next(filter(None, ["--prompts" if prompts else None, *excluded]), None):
            raise RequestError(f"{clash} cannot go with --explore: drop one of them")
    if prompts is not None:
        excluded = [*(sources.get(key) for key in ("prompt", "from_latents", "resume")), "--on" if on else None]
        if clash := next(filter(None, excluded), None):
            raise RequestError(f"{clash} cannot go with --prompts: drop one of them")


def _hint_of_file(prompt: str) -> str | None:
    """Return the option that takes this file or folder; None for a text that is no path.

    A plain word is a prompt, even if a folder has that name: only a text with a separator, or `.` or `..`, is a path.
    """
    path = Path(prompt)
    try:
        if path.is_dir() and (prompt in (".", "..") or "/" in prompt or os.sep in prompt):
            return "give the words themselves, in quotes"
        if not path.is_file():
            return None
    except (OSError, ValueError):  # too long for a name, or a null in it
        return None
    name = shlex.quote(prompt)
    ending = path.suffix.lower()
    if prompt.endswith(".latents.safetensors"):
        return f"saved latents are continued with --from {name}"
    if ending == ".safetensors":
        return f"an adapter is added with --lora {name}"
    if ending == ".json":
        return f"the settings beside a result are used again with --from {name}"
    if ending in (".yaml", ".yml", ".py"):
        return f"settings are read with --config {name}"
    if ending in _TABLE_ENDINGS:
        return f"many prompts are read with --prompts {name}"
    if ending in _TEXT_ENDINGS:
        return "give the words themselves, in quotes"
    return f"a picture or a video is given with --ref {name}" if ending else "give the words themselves, in quotes"


def _run(request: "GenerateRequest", *, dry_run: bool, as_json: bool, quiet: bool) -> None:
    from opensora_cli.core.ranks import find_context

    context = find_context(os.environ)
    is_main = context is None or context.is_main
    reporter = output.make_reporter(quiet=quiet or not is_main)
    if context is None:
        from opensora_cli.engine.generate.request import refuse_early

        refuse_early(request, dry_run=dry_run, reporter=reporter)
    output.note_start(reporter)
    with errors.uninterrupted():
        from opensora_cli.engine.generate import dry_run as planning
        from opensora_cli.engine.generate.run import generate_from_request

    if dry_run:
        plan = planning.plan_from_request(request, reporter=reporter, context=context)
        if is_main:
            output.print_result(plan, as_json=as_json)
        plan.require_fit()
        return
    flags = options.rank_words({"--json": as_json, "--quiet": quiet})
    result = generate_from_request(request, reporter=reporter, context=context, rank_flags=flags)
    if result is not None and is_main:
        output.print_result(result, as_json=as_json)


def _run_rows(
    request: "GenerateRequest",
    prompts: Path,
    part: str | None,
    *,
    sidecar: Path | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from opensora_cli.core.ranks import find_context
    from opensora_cli.engine.generate.prompts import Shard, read_prompts

    context = find_context(os.environ)
    is_main = context is None or context.is_main
    shard = Shard() if part is None else Shard.of(part)
    rows = read_prompts(prompts)
    reporter = output.make_reporter(quiet=quiet or not is_main)
    output.note_start(reporter)
    with errors.uninterrupted():
        from opensora_cli.engine.generate.batch import generate_rows, plan_rows

    if dry_run:
        plan = plan_rows(request, rows, shard=shard, reporter=reporter)
        if is_main:
            output.print_result(plan, as_json=as_json)
        plan.require_fit()
        return
    arguments = [
        f"--prompts={prompts}",
        *(argument for key, at in request.overrides.items() for argument in given_again(key, at.value)),
    ]
    arguments += options.rank_words(
        {"--shard": part, "--config": request.config, "--from": sidecar, "--json": as_json, "--quiet": quiet}
    )
    result = generate_rows(request, rows, shard=shard, reporter=reporter, context=context, rank_arguments=arguments)
    if result is None:
        return
    if is_main:
        output.print_result(result, as_json=as_json)
    # Every rank raises, so that all end with the same exit code.
    result.require_whole()


def given_again(key: str, value: object) -> list[str]:
    """Return the arguments that give a setting of this command line to a rank."""
    if not isinstance(value, list | tuple):
        return [f"--set={key}={value}"]
    # Joined to one text, a value that has the separator in it would be split.
    [option] = [option_of(name) for name, flag in FLAGS.items() if flag.key == key]
    return options.rank_words({option: value})


def _preset_defaults() -> Mapping[str, str]:
    """Return the values of the released model's presets, and the demo's where they differ."""
    from opensora_cli.settings.files import list_presets
    from opensora_cli.settings.load import load_preset

    values = {name: load_preset(name, prompt="any").model_dump(mode="json") for name in list_presets("generate")}
    demo, released = values.pop(ModelName.DEMO.value), next(iter(values.values()))
    return {
        option_of(name): shown if shown == own else f"{shown}; demo {own}"
        for name, row in FLAGS.items()
        if (shown := _shown(released, row.key)) and (own := _shown(demo, row.key))
    }


def _shown(values: Mapping[str, Any], key: str) -> str:
    """Return a setting as it can be typed; empty if the help text says what unset means."""
    *sections, name = key.split(".")
    for section in sections:
        values = values[section]
    value = values[name]
    if value is None:
        return "none" if key == "prompt_suffix.motion_score" else ""
    if value == "" or isinstance(value, bool | list):
        return ""
    return f"{value:g}" if isinstance(value, float) else f"{value}"


_OWN_ROWS = {
    "--config": options.config_row("Preset, or file of settings.", "generate")._replace(
        short="--preset", is_common=True
    ),
    "--set": Option(
        kind=list[str], metavar="KEY=VALUE", help="Set any setting, as in sampling.flow_shift=3. Repeatable."
    ),
    "--from": Option(kind=Path, metavar="FILE", help="Continue a result or its latents.", is_common=True),
    "--list-presets": Option(kind=bool, help="List the presets, as osora presets does."),
    "--dry-run": Option(kind=bool, help="Print the plan and whether it fits.", is_common=True),
    "--on": options.ON,
    "--prompt-text": Option(panel=PROMPT, kind=str, metavar="TEXT", help="Prompt that is the name of a file."),
    "--prompts": Option(
        panel=PROMPT,
        kind=Path,
        metavar="FILE",
        help="Make each row of a .txt, .csv, .jsonl or .parquet.",
        is_common=True,
    ),
    "--shard": Option(
        panel=PROMPT, kind=str, metavar="I/N", help="Make every N-th row of --prompts, from number I on."
    ),
    "--explore": Option(
        panel=SAMPLING,
        kind=int,
        metavar="K",
        help="Start K seeds and write a sheet of previews; --from finishes those that you choose.",
    ),
    "--explore-steps": Option(panel=SAMPLING, kind=int, metavar="N", help="Steps of each seed of --explore."),
}
_ALL_ROWS = {**_OWN_ROWS, **{option_of(name): row for name, row in FLAGS.items()}, **options.PRINTED}
ROWS = {
    "PROMPT": Option(help="What the video shows."),
    **{label: row for panel in _PANELS for label, row in _ALL_ROWS.items() if row.panel == panel},
}
COMMAND = Command(
    "generate", generate, ROWS, settings="generate:GenerateSettings", layered=True, defaults=_preset_defaults
)
