"""Machines that are planned for and need not be here: the figures of their GPUs and links, and how they are named.

Predicted times come from these figures alone: nothing is measured.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.formatting import first_few
from opensora_cli.settings.base import ByteSize, Section
from opensora_cli.settings.explain import Given, nearest
from opensora_cli.settings.files import EXTENDS, list_presets, presets_folder, read_yaml
from opensora_cli.settings.layers import all_keys, read_sections, validate

PRODUCT_EFFICIENCY = 0.489
ATTENTION_EFFICIENCY = 0.644
AUTOENCODER_EFFICIENCY = 0.149
"""The parts of the peak that products of matrices, attention and the autoencoder reach, fitted to evaluations and
decodes of 256px and 768px, timed on an H100 (`benchmarks/predict.py`); of other GPUs, assumed to be the same."""

_GIVEN = re.compile(r"(?:(?P<count>\d*)x)?(?P<name>.*)", re.DOTALL)
_MOST = 1024

_Figure = Annotated[float, Field(ge=1e-6, le=10**9)]
_KIND = "hardware"


class Rate(Section):
    """How fast bytes go one way: by the data sheet, and in practice."""

    peak_gb_per_s: _Figure = Field(description="1e9 bytes a second, in one direction")
    attainable_gb_per_s: _Figure = Field(description="what large transfers reach of it")

    @model_validator(mode="after")
    def _peak_is_most(self) -> Self:
        if self.attainable_gb_per_s > self.peak_gb_per_s:
            raise ValueError(
                f"attainable_gb_per_s={self.attainable_gb_per_s:g} must be at most peak_gb_per_s={self.peak_gb_per_s:g}"
            )
        return self

    def seconds(self, num_bytes: float) -> float:
        """Return how long so many bytes take."""
        return num_bytes / (self.attainable_gb_per_s * 1e9)


class GpuSettings(Section):
    """A kind of GPU, and the machine around it."""

    name: str = Field(min_length=1, description="what --on calls it")
    cuda_name: str = Field(min_length=1, description="what CUDA calls it")
    memory: ByteSize = Field(description="of one GPU")
    reserved: ByteSize = Field(default=2**30, description="of that, what is not free for weights and tensors")
    bf16_tflops: _Figure = Field(description="peak of dense products with sums in fp32, 1e12 operations a second")
    fp16_tflops: _Figure
    fp32_tflops: _Figure
    fp8_tflops: _Figure | None = Field(default=None, description="none: it has no products in 8 bits")
    int8_tops: _Figure | None = Field(
        default=None, description="peak of dense products of int8, 1e12 operations a second; none: not known"
    )
    memory_rate: Rate = Field(description="of the GPU's own memory")
    host_link: Rate = Field(description="between a GPU and page-locked memory of the host")
    gpu_link: Rate = Field(description="between two GPUs of a machine")
    node_link: Rate = Field(description="between machines, for each GPU")
    gpus_per_node: PositiveInt = Field(default=8, le=_MOST, description="of a machine")
    host_memory: ByteSize = Field(description="of a machine, for all of its GPUs")
    product_efficiency: float = Field(
        default=PRODUCT_EFFICIENCY, ge=1e-6, le=1, description="part of the peak that products of matrices reach"
    )
    attention_efficiency: float = Field(
        default=ATTENTION_EFFICIENCY, ge=1e-6, le=1, description="part of the peak that fused attention reaches"
    )
    autoencoder_efficiency: float = Field(
        default=AUTOENCODER_EFFICIENCY,
        ge=1e-6,
        le=1,
        description="part of the peak that the autoencoder's convolutions reach, all else that it does included",
    )
    launch_us: _Figure = Field(default=5.0, description="the host's time to start a kernel, in 1e-6 s: assumed")

    @model_validator(mode="after")
    def _some_memory_is_free(self) -> Self:
        if self.reserved >= self.memory:
            raise ValueError(f"reserved={self.reserved} must be under memory={self.memory}")
        return self

    @property
    def free_bytes(self) -> int:
        """What weights and tensors may take."""
        return self.memory - self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """GPUs that are planned for."""

    gpu: GpuSettings
    count: int | None
    """None: as many as the settings ask for."""
    given: str
    """What names them, as in `8xH100`."""

    def counts(self, given: Collection[str]) -> dict[str, Given]:
        """Return the numbers of devices and machines as settings, unless the dotted keys in `given` set them."""
        keys = ("parallel.gpus", "parallel.nnodes")
        if self.count is None or not {*keys, "parallel.devices"}.isdisjoint(given):
            return {}
        machines = max(1, self.count // self.gpu.gpus_per_node)
        return {key: Given(value, "--on") for key, value in zip(keys, (self.count // machines, machines), strict=True)}

    def require(self, *, device: str, ranks: int, ranks_per_node: int) -> None:
        """Raise RequestError if settings ask for more GPUs than are named, or for another device."""
        if device == "cpu":
            raise RequestError(f"--on {self.given} plans for GPUs, and the device is cpu: drop one of them")
        if self.count is not None and ranks > self.count:
            raise RequestError(f"--on {self.given} has {self.count} devices, and {ranks} are asked for: use --gpus N")
        if ranks_per_node > self.gpu.gpus_per_node:
            raise RequestError(
                f"{ranks_per_node} devices of one machine are asked for, and gpus_per_node={self.gpu.gpus_per_node} of "
                f"{self.gpu.name}: use --on {ranks}x{self.gpu.name}"
            )


def read_machine(text: str) -> PlannedMachine:
    """Return what `--on` names: `H100`, `8xH100`, or a YAML file of one's own, as in `rig.yaml` or `2xrig.yaml`.

    Raises:
        RequestError: there is no hardware of that name, a number of devices is wrong, or a figure in the file is.
        FileProblem: the file is missing, or no YAML.
    """
    # A file may have an x in its name.
    if Path(text).is_file():
        return PlannedMachine(gpu=_read_gpu(text), count=None, given=text)
    match = _GIVEN.fullmatch(text)
    assert match is not None
    count, name = match["count"], match["name"].strip()
    if not name or count == "":
        raise RequestError(f"--on {text} must be NAME, NxNAME or a YAML file, as in 8xH100")
    gpu = _read_gpu(name)
    if count is None:
        return PlannedMachine(gpu=gpu, count=None, given=text)
    number = int(count) if len(count) < 9 else _MOST + 1
    if not 1 <= number <= _MOST:
        raise RequestError(f"--on {text} must name 1 to {_MOST} devices")
    if number > gpu.gpus_per_node and number % gpu.gpus_per_node:
        below = number - number % gpu.gpus_per_node
        raise RequestError(
            f"--on {text} fills no whole machines of gpus_per_node={gpu.gpus_per_node}: "
            f"use {below} or {below + gpu.gpus_per_node}"
        )
    return PlannedMachine(gpu=gpu, count=number, given=text)


def _read_gpu(name: str) -> GpuSettings:
    known = {each.lower(): each for each in list_presets(_KIND)}
    if name.lower() in known and not Path(name).is_file():
        path = presets_folder() / _KIND / f"{known[name.lower()]}.yaml"
    elif Path(name).suffix.lower() in (".yaml", ".yml") or Path(name).is_file():
        path = Path(name)
    else:
        # `A100` and `RTX4090` are parts of a name, or have one in them.
        parts = [each for low, each in known.items() if low.startswith(name.lower()) or name.lower().endswith(low)]
        close = parts[0] if parts else nearest(name, known.values(), cutoff=0.5)
        hint = f"did you mean {close}?" if close else "or name a YAML file of your own, as configs/hardware/ has them"
        raise RequestError(f"hardware {name!r} is not one of {', '.join(sorted(known.values()))}", hint=hint)
    given = read_sections(GpuSettings, read_yaml(path), source=str(path))
    fields = GpuSettings.model_fields
    required = (key for key in all_keys(GpuSettings) if fields[key.partition(".")[0]].is_required())
    if missing := [key for key in required if key not in given]:
        raise RequestError(
            f"{path} must give {first_few(missing)}",
            hint=f"`{EXTENDS}: {_KIND}/H100` takes from that GPU what the file does not give",
        )
    return validate(GpuSettings, given)
