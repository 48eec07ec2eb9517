"""Settings of `osora env-check`."""

from pydantic import Field

from opensora_cli.settings.base import Section


class EnvCheckSettings(Section):
    """What is checked, and how it is printed."""

    files: tuple[str, ...] = Field(
        default=(), description="Dockerfiles and shell files whose variables are checked, too"
    )
    all_reduce: bool = Field(default=True, description="run an all-reduce over the devices, in processes of their own")
    all_reduce_seconds: float = Field(default=15.0, gt=0, le=600, description="when the all-reduce counts as hung")
    bug_report: bool = Field(default=False, description="hide users, hosts, folders and tokens")
