"""`osora env-check`: whether this machine can run osora."""

import os
from typing import Annotated

import typer

from opensora_cli.cli import errors, options, output
from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.enums import EnvProfile

_RECOMMENDED = "Recommended settings"

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE", help="Dockerfiles and shell files to check, too.", show_default=False),
]
NoAllReduce = Annotated[bool, typer.Option("--no-all-reduce", help="Do not run the all-reduce over the devices.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", help="When the all-reduce counts as hung. Default: 15."),
]
BugReport = Annotated[
    bool, typer.Option("--bug-report", help="Print a short report that hides users, hosts, folders and tokens.")
]
ProfileOption = Annotated[
    EnvProfile | None,
    typer.Option(
        "--profile",
        help="Print what is recommended for a 24 GB desktop, an 80 GB cloud machine or several nodes.",
        rich_help_panel=_RECOMMENDED,
    ),
]
Export = Annotated[bool, typer.Option("--export", help="As shell lines, for eval.", rich_help_panel=_RECOMMENDED)]


def env_check(
    files: Files = None,
    no_all_reduce: NoAllReduce = False,
    timeout: Timeout = None,
    bug_report: BugReport = False,
    profile: ProfileOption = None,
    export: Export = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check this machine, its environment variables, and Dockerfiles and shell files if given.

    Exits with 0 where nothing stops a run, else with 4.

    Examples:

      osora env-check

      osora env-check Dockerfile train.sh

      eval "$(osora env-check --profile local --export)"
    """
    with errors.interruptible():
        if profile is not None:
            _refuse_beside_profile(files=bool(files), bug_report=bug_report)
            _print_profile(profile, export=export, as_json=json_)
            return
        if export:
            raise RequestError("--export needs a profile", hint=f"add --profile {' or '.join(EnvProfile)}")
        from opensora_cli.engine.env_check.torch_variables import refused_by_torch
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.layers import validate
        from opensora_cli.settings.tools import EnvCheckSettings

        given = {
            "files": Given(files or [], "FILE"),
            "all_reduce": Given(not no_all_reduce, "--no-all-reduce"),
            "all_reduce_seconds": Given(timeout, "--timeout"),
            "bug_report": Given(bug_report, "--bug-report"),
        }
        settings = validate(EnvCheckSettings, {key: at for key, at in given.items() if at.value is not None})
        environment = dict(os.environ)
        for name in refused_by_torch(environment):
            del os.environ[name]  # without it torch can be imported; it is reported
        with errors.uninterrupted():
            from opensora_cli.engine.env_check.check import env_check as check
            from opensora_cli.engine.generate.planning import make_plan

        reporter = output.make_reporter(quiet=quiet)
        report = check(settings, make_plan=make_plan, environment=environment, reporter=reporter)
        output.print_result(report, as_json=json_)
        report.require_fine()


def _refuse_beside_profile(*, files: bool, bug_report: bool) -> None:
    for given, name in ((files, "FILE"), (bug_report, "--bug-report")):
        if given:
            raise RequestError(
                f"{name} has no effect beside --profile, which checks nothing", hint="run osora env-check twice"
            )


def _print_profile(name: EnvProfile, *, export: bool, as_json: bool) -> None:
    from opensora_cli.engine.env_check.profiles import PROFILES

    profile = PROFILES[name]
    if export and not as_json:
        output.print_lines(profile.export_lines())
    else:
        output.print_result(profile.compare(os.environ), as_json=as_json)
