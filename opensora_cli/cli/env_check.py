"""`osora env-check`: problems of this machine and its environment."""

import os

from opensora_cli.cli.command import Call, make_command
from opensora_cli.cli.output import print_lines
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.formatting import plain
from opensora_cli.engine.env_check.report import PROFILES
from opensora_cli.settings.flags import Option
from opensora_cli.settings.tools import EnvCheckSettings, EnvProfile

_RECOMMENDED = "Recommended settings"


def env_check(settings: EnvCheckSettings, call: Call) -> None:
    """Check this machine, its environment variables, and Dockerfiles and shell files if given.

    Exits with 4 if something prevents a run.

    Examples:
      osora env-check
      osora env-check Dockerfile train.sh
      eval "$(osora env-check --profile local --export)"
    """
    export = "--export" in call.given
    if (profile := call.value("--profile", EnvProfile)) is not None:
        call.refuse(
            ("FILE", "--bug-report"), beside="--profile, which checks nothing", hint="run osora env-check twice"
        )
        if export and not call.as_json:
            print_lines(PROFILES[profile].export_lines())
        else:
            call.show(PROFILES[profile])
        return
    if export:
        raise RequestError("--export needs a profile", hint=f"add --profile {' or '.join(EnvProfile)}")
    try:
        with call.loading():
            from opensora_cli.engine.env_check.check import env_check as check
    except ValueError as error:
        reason = plain(str(error).strip().partition("\n")[0])
        hint = "correct or unset TORCH_DISTRIBUTED_DEBUG and TORCH_LOGS"
        raise HardwareError(f"torch cannot be imported: {reason}", hint=hint) from error

    call.show(check(settings, environment=os.environ, reporter=call.reporter))


_ROWS = {
    "FILE": Option("files"),
    "--no-all-reduce": Option("all_reduce", help="Do not run the all-reduce over the devices.", is_negated=True),
    "--timeout": Option("all_reduce_seconds", help="Timeout of the all-reduce.", metavar="SECONDS", default="60"),
    "--bug-report": Option("bug_report", help="Print a short report that hides users, hosts, folders and tokens."),
    "--profile": Option("", _RECOMMENDED, "Print settings for one GPU, a cloud machine or a cluster.", kind=EnvProfile),
    "--export": Option("", _RECOMMENDED, "Print them as shell lines, for eval.", kind=bool),
}
COMMAND = make_command(env_check, _ROWS)
