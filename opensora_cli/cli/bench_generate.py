"""`osora bench-generate`: seconds, memory and likeness of a video made with other settings."""

from dataclasses import replace

from opensora_cli.cli import generate
from opensora_cli.cli.command import Call, make_command
from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.flags import Option
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.generate_sections import OutputSettings
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import generate_request
from opensora_cli.settings.tries import read_tries, refuse_unfit, tried_settings

_COMPARED = "Compared settings"
_MOST_REPEATS = 1000


def bench_generate(given: dict[str, Given], call: Call) -> None:
    """Time a video by stage, and compare it with the same video made with other settings.

    The exact run has the settings as they are given. No video is kept. A row with equal latents, evaluations and
    seconds had no effect.

    Examples:
      osora bench-generate
      osora bench-generate "raining, sea" --try euler-15 --try ab2-15
      osora bench-generate --try sampling.guidance_interval=0.2,0.9
    """
    from opensora_cli.engine.generate.request import refuse_early, resolve

    tries = read_tries(call.value("--try", list) or [])
    repeats = call.value("--repeats", int)
    if repeats is not None and not 1 <= repeats <= _MOST_REPEATS:
        raise RequestError(f"--repeats {repeats} must be from 1 to {_MOST_REPEATS}")
    saved = generate.continued(given, call)
    request = generate_request(given, assignments=call.assignments, saved=saved, config=call.config, any_prompt=True)
    # No result is written.
    usual = Given(OutputSettings().path, "bench-generate")
    request = replace(request, overrides={**request.overrides, "output.path": usual})
    exact = resolve(request, reporter=call.reporter, context=call.context, loading=call.loading)
    refuse_unfit(exact)
    if call.context is None:
        refuse_early(exact, dry_run=False)
        for name, changes in (tries or {}).items():
            tried_settings(exact, changes, name=name)
    with call.loading():
        from opensora_cli.engine.bench_generate import bench_generate as compare

    flags = call.again("--try", "--repeats")
    report = compare(exact, tries, repeats=repeats or 1, reporter=call.reporter, context=call.context, rank_flags=flags)
    call.show(report)


_SHARED = (
    *("--config", "--set", "--from", "--res", "--num-frames", "--ref", "--steps", "--seed", "--model", "--weights"),
    *("--device", "--gpus", "--devices"),
)

_ROWS = {
    "PROMPT": Option("prompt", help="Description of the video."),
    "--try": Option(
        "",
        _COMPARED,
        "Settings that differ from the exact run: KEY=VALUE,KEY=VALUE, or a name of the standard set such as euler-15. "
        "`exact` times that run alone.",
        "NAME|SETTINGS",
        list[str],
        default="the standard set",
    ),
    "--repeats": Option("", _COMPARED, "Timed runs of each setting, for mean and deviation.", "N", int, default="1"),
    **{label: generate.ROWS[label]._replace(is_common=False) for label in _SHARED},
}
COMMAND = make_command(bench_generate, _ROWS, settings=GenerateSettings, on_ranks=True)
