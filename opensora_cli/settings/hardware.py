"""Machines to plan for: figures of GPUs and links, and the names that `--on` takes.

Predicted times come from these figures. Nothing is measured.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.formatting import nearest
from opensora_cli.core.section import ByteSize, FileName, Section
from opensora_cli.settings.layers import Given, list_presets, preset_path, read_sections, read_settings_file, validate

PRODUCT_EFFICIENCY = 0.489
ATTENTION_EFFICIENCY = 0.644
AUTOENCODER_EFFICIENCY = 0.149
"""Shares of the peak that matrix products, attention and the autoencoder reach. They are fitted to times of 256px and
768px on an H100 (`benchmarks/predict.py`), and assumed for other GPUs."""

_GIVEN = re.compile(r"(?:(?P<count>\d*)x)?(?P<name>.*)", re.DOTALL)
_SIZE = re.compile(r"[0-9.]+ ?[MG]i?B", re.IGNORECASE)
_NOT_IN_NAMES = re.compile(r"nvidia|geforce|rtx|[\s_-]", re.IGNORECASE)
_STAND_IN = "4090"
"""GPU whose machine a GPU that is named by its memory has."""
_MAX_DEVICES = 1024
_KIND = "hardware"
_Figure = Annotated[float, Field(ge=1e-6, le=10**9)]


class Rate(Section):
    """Bandwidth in one direction."""

    peak_gb_per_s: _Figure = Field(description="Bandwidth of the data sheet in 1e9 bytes a second.")
    attainable_gb_per_s: _Figure = Field(description="Bandwidth of large transfers in 1e9 bytes a second.")

    def seconds(self, num_bytes: float) -> float:
        """Return the time of a transfer."""
        return num_bytes / (self.attainable_gb_per_s * 1e9)


class GpuSettings(Section):
    """GPU model and its machine."""

    name: FileName = Field(description="Name for --on.")
    device_name: FileName = Field(description="Name that torch reports.")
    memory: ByteSize = Field(description="Memory of one GPU.")
    reserved: ByteSize = Field(2**30, description="Memory that weights and tensors cannot use.")
    bf16_tflops: _Figure = Field(description="Peak of dense bfloat16 products with fp32 sums, in 1e12 a second.")
    fp16_tflops: _Figure
    fp32_tflops: _Figure
    fp8_tflops: _Figure | None = Field(None, description="Peak of 8-bit products. None means unsupported.")
    int8_tops: _Figure | None = Field(None, description="Peak of dense int8 products. None means unknown.")
    memory_rate: Rate = Field(description="Bandwidth of the GPU's memory.")
    host_link: Rate = Field(description="Bandwidth between a GPU and pinned host memory.")
    gpu_link: Rate = Field(description="Bandwidth between two GPUs of a machine.")
    node_link: Rate = Field(description="Bandwidth between machines, for each GPU.")
    gpus_per_node: int = Field(8, ge=1, le=_MAX_DEVICES, description="GPUs of a machine.")
    host_memory: ByteSize = Field(description="Host memory of a machine.")
    product_efficiency: _Figure = Field(PRODUCT_EFFICIENCY, description="Share for matrix products.")
    attention_efficiency: _Figure = Field(ATTENTION_EFFICIENCY, description="Share for fused attention.")
    autoencoder_efficiency: _Figure = Field(AUTOENCODER_EFFICIENCY, description="Share for convolutions.")
    launch_us: _Figure = Field(5.0, description="Assumed time to launch a kernel, in 1e-6 s.")

    def rules(self) -> Iterator[str]:
        if self.reserved >= self.memory:
            yield f"memory={self.memory} must be over reserved={self.reserved}"

    @property
    def free_bytes(self) -> int:
        """Memory for weights and tensors."""
        return self.memory - self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """GPUs to plan for."""

    gpu: GpuSettings
    count: int | None
    """Number of GPUs. None means as many as the settings ask for."""
    given: str
    """Name that was given, as in `8xH100`."""
    has_speed: bool = True
    """Whether the speed of the GPUs is known; that of a GPU that is named by its memory is not."""

    def counts(self, given: Collection[str]) -> dict[str, Given]:
        """Return the numbers of devices and machines as settings, unless keys in `given` set them."""
        keys = ("parallel.gpus", "parallel.nnodes")
        if self.count is None or not {*keys, "parallel.devices"}.isdisjoint(given):
            return {}
        machines = max(1, self.count // self.gpu.gpus_per_node)
        return {key: Given(value, "--on") for key, value in zip(keys, (self.count // machines, machines), strict=True)}

    def require(self, *, device: str, ranks: int, ranks_per_node: int) -> None:
        """Raise RequestError if settings ask for more GPUs than are named, or for another device."""
        most = self.gpu.gpus_per_node
        if device == "cpu":
            raise RequestError(f"--on {self.given} plans for GPUs, and the device is cpu: drop one of them")
        if self.count is not None and ranks > self.count:
            raise RequestError(f"--on {self.given} has {self.count} devices, and {ranks} are asked for: use --gpus N")
        if ranks_per_node > most:
            raise RequestError(
                f"{ranks_per_node} devices of one machine are asked for, and gpus_per_node={most} of {self.gpu.name}: "
                f"use --on {ranks}x{self.gpu.name}"
            )


def read_machine(text: str) -> PlannedMachine:
    """Return the machine of `--on`: `H100`, `8xH100` or `12GiB`."""
    match = _GIVEN.fullmatch(text)
    assert match is not None
    count, name = match["count"], match["name"].strip()
    if not name or count == "":
        raise RequestError(f"--on {text} must be NAME, NxNAME or SIZE, as in 8xH100 or 12GiB")
    gpu = _read_gpu(name)
    number = None if count is None else int(count[:9])
    if number is not None and not 1 <= number <= _MAX_DEVICES:
        raise RequestError(f"--on {text} must name 1 to {_MAX_DEVICES} devices")
    if number is not None and number > gpu.gpus_per_node and (over := number % gpu.gpus_per_node):
        below = number - over
        raise RequestError(
            f"--on {text} fills no whole machines of gpus_per_node={gpu.gpus_per_node}: "
            f"use {below} or {below + gpu.gpus_per_node}"
        )
    return PlannedMachine(gpu=gpu, count=number, given=text, has_speed=_SIZE.fullmatch(name) is None)


def find_gpu(device_name: str) -> GpuSettings | None:
    """Return the figures of a GPU by its name in CUDA; None for a GPU that osora does not know."""
    return next((gpu for gpu in map(_read_preset, list_presets(_KIND)) if gpu.device_name == device_name), None)


def _plain(name: str) -> str:
    """Return the name of a GPU in the form that names are compared in: `4060ti` for `GeForce RTX 4060 Ti`."""
    return _NOT_IN_NAMES.sub("", name).lower()


def _read_preset(preset: str, **changes: object) -> GpuSettings:
    path = preset_path(preset, _KIND)
    below = read_sections(GpuSettings, read_settings_file(path), source=str(path))
    own = {key: Given(value, f"--on {changes['name']}") for key, value in changes.items()}
    return validate(GpuSettings, own, below=below)


def _read_gpu(name: str) -> GpuSettings:
    if _SIZE.fullmatch(name) is not None:
        shown = f"a GPU with {name}"
        return _read_preset(_STAND_IN, name=name, device_name=shown, memory=name, fp8_tflops=None, int8_tops=None)
    known = {_plain(each): each for each in list_presets(_KIND)}
    if _plain(name) in known:
        return _read_preset(known[_plain(name)])
    # `A100` and `4060 Ti` are parts of names.
    parts = [each for plain, each in known.items() if _plain(name) and _plain(name) in plain]
    close = " or ".join(parts) or nearest(name, known.values(), cutoff=0.5)
    raise RequestError(
        f"hardware {name!r} is not one of {', '.join(sorted(known.values()))}",
        hint=f"did you mean {close}?" if close else "give its memory, as in 12GiB",
    )
