"""Settings of `osora bench-comm`."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from opensora_cli.settings.base import ByteSize, PlotFile, Section
from opensora_cli.settings.devices import ParallelSettings
from opensora_cli.settings.enums import BenchDevice, Collective, Scaling

MIB = 2**20
_LARGEST = 2**40


_FOR_SCALING = (Collective.ALL_REDUCE, Collective.ALL_TO_ALL)
"""What the steps that are timed send most."""


class BenchCommSettings(Section):
    """What is measured between which ranks, and what is made of it."""

    parallel: ParallelSettings = Field(
        default=ParallelSettings(), description="the ranks; by default one for each GPU, or two on CPUs"
    )
    device: BenchDevice = Field(
        default=BenchDevice.AUTO,
        description="on what the ranks run; auto: GPUs, or CPUs where there are none and none are asked for",
    )
    min_bytes: ByteSize = Field(default=8, le=_LARGEST, description="smallest size, as in 8 or 1KiB")
    max_bytes: ByteSize | None = Field(
        default=None,
        le=_LARGEST,
        description="largest size, as in 1GiB; none: 1 GiB on GPUs, 4 MiB on CPUs, where it shows function only",
    )
    iters: int = Field(default=20, ge=1, le=100_000, description="timed repeats of each size")
    warmup: int = Field(default=5, ge=2, le=100_000, description="repeats before the clock starts")
    collectives: tuple[Collective, ...] = Field(
        default=tuple(Collective), min_length=1, description="what is measured; by default everything"
    )
    scaling: Scaling | None = Field(
        default=None, description="time sampling and training steps at 1, 2, 4 .. ranks, too; none: do not"
    )
    plot: PlotFile | None = Field(default=None, description="file for a chart: .png, .svg or .pdf")
    overwrite: bool = Field(default=False, description="replace an existing file")

    @field_validator("parallel")
    @classmethod
    def _a_rank_has_a_peer(cls, value: ParallelSettings) -> ParallelSettings:
        if value.degrees:
            raise ValueError(
                f"parallel.{next(iter(value.degrees))} has no effect here: use none of {', '.join(value.degree_names)}"
            )
        if (value.gpus is not None or value.devices is not None) and value.world_size < 2:
            raise ValueError(f"gpus={value.ranks_per_node} must be at least 2: one rank has no peer")
        return value

    @model_validator(mode="after")
    def _sizes_are_a_range(self) -> Self:
        if self.max_bytes is not None and self.min_bytes > self.max_bytes:
            raise ValueError(f"min_bytes={self.min_bytes} is over max_bytes={self.max_bytes}: swap them")
        return self

    @property
    def measured(self) -> tuple[Collective, ...]:
        """What is measured: what was asked for, and what the prediction for more ranks needs."""
        asked = set(self.collectives) | set(_FOR_SCALING if self.scaling else ())
        return tuple(collective for collective in Collective if collective in asked)

    def largest_bytes(self, *, on_gpu: bool) -> int:
        """Return the largest size that is asked for, by default what suits the device."""
        if self.max_bytes is not None:
            return self.max_bytes
        return max(1024 * MIB if on_gpu else 4 * MIB, self.min_bytes)
