"""`osora generate`: from a prompt to a video."""

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

from opensora_cli.cli.command import CONFIG, ON, SET, VERBOSE, Call, make_command, shown_default
from opensora_cli.core.section import shown
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.flags import FLAGS, MACHINE, OUTPUT, PROMPT, REFERENCE, SAMPLING, VIDEO, Option, option_of
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, list_presets
from opensora_cli.settings.load import GenerateRequest, SavedSettings, generate_request, load_preset

_FROM = ("--from", "--resume", "--from-latents")
_PANELS = ("", PROMPT, VIDEO, REFERENCE, SAMPLING, MACHINE, OUTPUT)


def generate(given: dict[str, Given], call: Call) -> None:
    """Make a video from a prompt, and from pictures or videos if given.

    Examples:
      osora generate "raining, sea"
      osora generate "the boat turns around" --ref boat.png --out boat.mp4
      osora generate "the boat turns around" --continue boat.mp4
      osora generate --from samples/raining-sea_seed42.mp4 --seed 7
    """
    saved, dry_run = continued(given, call), "--dry-run" in call.given
    _refuse_combinations(call, given)
    if (clip := call.value("--continue", Path)) is not None:
        given["condition.references"] = Given(str(clip), "--continue")
        given["condition.continued"] = Given(0, "--continue")
    if "--explore" in call.given:
        given["output.explore"] = Given(True, "--explore")
        given["sampling.num_samples"] = Given(call.given["--explore"], "--explore")
        given["sampling.stop_at"] = Given(call.given["--explore-steps"], "--explore-steps")
    request = generate_request(given, assignments=call.assignments, saved=saved, config=call.config, on=call.planned)
    if (table := call.value("--prompts", Path)) is not None:
        _make_rows(request, call, table, dry_run=dry_run)
        return
    from opensora_cli.engine.generate.request import refuse_early, resolve

    settings = resolve(request, reporter=call.reporter, context=call.context, loading=call.loading)
    if call.context is None:
        refuse_early(settings, dry_run=dry_run)
    if dry_run:
        with call.loading():
            from opensora_cli.engine.generate import dry_run as planning

        call.show(planning.plan_generation(settings, reporter=call.reporter, on=request.on, context=call.context))
    else:
        with call.loading():
            from opensora_cli.engine.generate import run

        call.show(run.generate(settings, reporter=call.reporter, context=call.context, rank_flags=call.again()))


def continued(given: dict[str, Given], call: Call) -> SavedSettings | None:
    """Return the settings in the sidecar that `--from` names, or add what its file records to `given`."""
    sources = [label for label in _FROM if label in call.given]
    if not sources:
        return None
    call.refuse(sources[1:], beside=sources[0])
    file = call.value(sources[0], Path)
    assert file is not None
    from opensora_cli.engine import show

    saved = show.continued(file, given)
    if saved is None and not {"resume", "from_latents"} & given.keys():
        call.reporter.note(f"{file} has no sidecar: it gives its prompt and seed alone")
    return saved


def _refuse_combinations(call: Call, given: Mapping[str, Given]) -> None:
    call.require("--prompts", beside="--shard")
    call.require("--dry-run", beside="--on")
    call.require("--explore-steps", beside="--explore")
    call.require("--explore", beside="--explore-steps")
    latents = _FROM if {"from_latents", "resume"} & given.keys() else ()
    for option, others in (
        ("--explore", ("--prompts", "--stop-at", "--num-samples")),
        ("--prompts", ("PROMPT",)),
        ("--continue", ("--ref", "--t2i2v", "--width", "--height", "--res", "--aspect-ratio", "--fps")),
    ):
        if option in call.given:
            call.refuse((*others, *latents), beside=option)


def _make_rows(request: GenerateRequest, call: Call, table: Path, *, dry_run: bool) -> None:
    from opensora_cli.engine.generate.prompts import read_prompts, rows_of_shard

    shard = call.value("--shard", str)
    own = rows_of_shard("1/1" if shard is None else shard)
    rows = read_prompts(table)[own]
    with call.loading():
        from opensora_cli.engine.generate.batch import generate_rows, plan_rows

    if dry_run:
        call.show(plan_rows(request, rows, reporter=call.reporter))
    else:
        made = generate_rows(request, rows, reporter=call.reporter, context=call.context, rank_arguments=call.words[1:])
        call.show(made)


def _preset_defaults() -> Mapping[str, str]:
    """Return the values of the released model's presets, and the demo's where they differ."""
    presets = {name: load_preset(name) for name in list_presets("generate")}
    demo, released = presets.pop(DEMO), next(iter(presets.values()))
    found = {}
    for name, row in FLAGS.items():
        usual, own = (attrgetter(row.key)(preset) for preset in (released, demo))
        if text := shown_default(usual):
            found[option_of(name)] = text if usual == own else f"{text}; demo {shown(own)}"
    return found


_OWN_ROWS = {
    "--config": CONFIG._replace(help="Preset, or file of settings.", short="--preset", is_common=True),
    "--set": SET._replace(help="Set any setting, as in sampling.flow_shift=3."),
    "--from": Option(kind=Path, metavar="FILE", help="Continue a result or its latents.", is_common=True),
    **dict.fromkeys(_FROM[1:], Option(kind=Path, metavar="FILE", help="Other name of --from.")),
    VERBOSE: Option("", OUTPUT, "Show every stage, and how the video is made on this machine.", kind=bool, short="-v"),
    "--dry-run": Option(kind=bool, help="Print the plan and whether it fits.", is_common=True),
    "--on": ON,
    "--prompts": Option("", PROMPT, "Make each row of a .txt or .csv.", "FILE", Path, is_common=True),
    "--shard": Option("", PROMPT, "Make every N-th row of --prompts, from number I on.", "I/N"),
    "--continue": Option("", REFERENCE, "Continue a video at its size and rate.", "FILE", Path, is_common=True),
    "--explore": Option("", SAMPLING, "Start K seeds and write a sheet of previews; --from finishes one.", "K"),
    "--explore-steps": Option("", SAMPLING, "Steps of each seed of --explore.", "N"),
}
_ALL_ROWS = {**_OWN_ROWS, **{option_of(name): row for name, row in FLAGS.items() if row.key != "from_latents"}}
ROWS = {
    "PROMPT": Option("prompt", help="Description of the video."),
    **{label: row for panel in _PANELS for label, row in _ALL_ROWS.items() if row.panel == panel},
}
COMMAND = make_command(generate, ROWS, settings=GenerateSettings, on_ranks=True, defaults=_preset_defaults)
