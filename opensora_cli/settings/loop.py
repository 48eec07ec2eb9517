"""How long training goes on, and in what steps."""

from pydantic import Field, NonNegativeInt, PositiveInt

from opensora_cli.settings.base import Section


class LoopSettings(Section):
    """How long to train, and what a step is."""

    steps: PositiveInt = Field(default=1000, le=10**9, description="updates in all")
    micro_batches: PositiveInt | None = Field(
        default=None,
        le=10**9,
        description="batches whose mean gradient makes one update, over all devices: a multiple of the devices with "
        "batches of their own; none: one for each of them",
    )
    ema_decay: float | None = Field(
        default=0.999, ge=0, lt=1, description="of the averaged weights, which are exported; none: no average"
    )
    log_every: PositiveInt = Field(default=20, le=10**9, description="updates between two lines of the log")
    seed: NonNegativeInt = Field(
        default=0, le=2**31, description="of the first weights, and of every batch and its noise"
    )
