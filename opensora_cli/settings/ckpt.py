"""Settings of `osora ckpt`: one class for each of its commands."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import PurePath
from typing import Annotated

from pydantic import Field

from opensora_cli.core.choices import QKV, Format, Rotary, Selection
from opensora_cli.core.section import ByteSize, FileName, Section, matching
from opensora_cli.models.registry import DOWNLOADS, DownloadName


class WeightDType(StrEnum):
    """Floating point type of written weights. 8-bit types get a scale beside each weight."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def is_fp8(self) -> bool:
        """Whether the type has 8 bits."""
        return self.startswith("fp8")


_Sha256 = Annotated[str, matching("(?i)[0-9a-f]{64}", "must be 64 hexadecimal digits")]
_FORMAT_OF_ENDING = {".safetensors": Format.SAFETENSORS} | dict.fromkeys((".pt", ".pth", ".bin"), Format.TORCH)
Patterns = tuple[FileName, ...]
_Tolerance = Annotated[float, Field(ge=0, le=1e38)]


class InspectSettings(Section):
    """Settings of `osora ckpt inspect`."""

    path: FileName = Field(description="File or folder.")
    select: Selection | None = Field(None, description="Weights of a training to use. None: model.")
    only: Patterns = Field((), description="Use only tensors named like 'double_blocks.*'.")
    all: bool = Field(False, description="Print a row for each tensor, too. --only prints those that match.")


class VerifySettings(Section):
    """Settings of `osora ckpt verify`."""

    path: FileName = Field(description="File or folder.")
    select: Selection | None = Field(None, description="Weights of a training to use. None: model.")
    preset: str | None = Field(None, description="Require names and shapes of a released model.")
    sha256: _Sha256 | None = Field(None, description="Required hash of the file.")
    data: bool = Field(True, description="Read all data to check hashes and find non-finite values.")

    def rules(self) -> Iterator[str]:
        if self.sha256 is not None and not self.data:
            yield "sha256 cannot be checked with data=false, which reads nothing: drop one of them"


class DiffSettings(Section):
    """Settings of `osora ckpt diff`."""

    first: FileName = Field(description="File or folder.")
    second: FileName = Field(description="File or folder.")
    select: Selection | None = Field(None, description="Weights of a training to use. None: model.")
    only: Patterns = Field((), description="Use only tensors named like 'double_blocks.*'.")
    rtol: _Tolerance = Field(0.0, description="Relative tolerance, of B. Dtypes may differ.")
    atol: _Tolerance = Field(0.0, description="Absolute tolerance. Dtypes may differ.")

    @property
    def is_exact(self) -> bool:
        """Whether all values must be bitwise identical."""
        return self.rtol == self.atol == 0


class WriteSettings(Section):
    """Place and format of written weights."""

    target: FileName = Field(description="File or folder to write.")
    format: Format | None = Field(None, description="Format to write. None: by the ending, else safetensors shards.")
    shard_size: ByteSize | None = Field(None, description="Size of a shard, as in 4GB. None means 4096 MiB.")
    hashing: bool = Field(True, description="Record the hashes of the source and of each shard.")
    overwrite: bool = Field(False, description="Replace existing files.")

    @property
    def resolved_format(self) -> Format:
        """Format that is given, or that of the target's name."""
        return self.format or self.named_format or Format.SAFETENSORS_SHARDS

    @property
    def named_format(self) -> Format | None:
        """Format of the target's ending, or None for an unknown ending."""
        return _FORMAT_OF_ENDING.get(PurePath(self.target).suffix.lower())

    def rules(self) -> Iterator[str]:
        written, named, ending = self.resolved_format, self.named_format, PurePath(self.target).suffix
        # `v1.5` is a name, and letters after a dot are an ending.
        if self.format is None and named is None and ending[1:2].isalpha():
            yield f"target={self.target} has an ending, {ending}, that names no format: add --format"
            return
        if named not in (None, written):
            yield f"format={written} must agree with the ending of target={self.target}, {named}: use another name"
        if self.shard_size is not None and not written.has_shards:
            sharded = ", ".join(format_ for format_ in Format if format_.has_shards)
            yield f"shard_size={self.shard_size} has no effect on format={written}: use one of {sharded}"


class ConvertSettings(WriteSettings):
    """Settings of `osora ckpt convert`."""

    source: FileName = Field(description="File or folder to read.")
    select: Selection | None = Field(None, description="Weights of a training to use. None: model.")
    only: Patterns = Field((), description="Use only tensors named like 'double_blocks.*'.")
    drop: Patterns = Field((), description="Drop tensors whose names in SRC match.")
    rename: tuple[str, ...] = Field((), description="Replace starts of names, or re:PATTERN=NEW.")
    qkv: QKV | None = Field(None, description="Write q, k and v as one tensor, or as three.")
    rotary: Rotary | None = Field(None, description="Order of rotary pairs in a head.")
    dtype: WeightDType | None = Field(None, description="Dtype of all floating point weights.")
    preset: str | None = Field(None, description="Require names and shapes of a released model.")

    @property
    def options(self) -> dict[str, object]:
        """Options that the result depends on, if given."""
        given = self.model_dump(mode="json", include={"select", "only", "drop", "rename", "qkv", "rotary", "dtype"})
        return {name: value for name, value in given.items() if value}


class MergeLoraSettings(WriteSettings):
    """Settings of `osora ckpt merge-lora`."""

    base: FileName = Field(description="File or folder of the model.")
    adapter: FileName = Field(description="PEFT folder, or a diffusers, ComfyUI or kohya file.")
    unmerge: bool = Field(False, description="Remove the adapter from BASE again.")
    scale: float = Field(1.0, ge=-100, le=100, description="Factor of the adapter.")

    @property
    def options(self) -> dict[str, object]:
        """Options that the result depends on."""
        return {"adapter": self.adapter, "unmerge": self.unmerge, "scale": self.scale}


class DownloadSettings(Section):
    """Settings of `osora ckpt download`."""

    preset: DownloadName = Field(description=f"Model to download: {', '.join(DOWNLOADS)}.")
    to: FileName = Field("ckpts", description="Folder for the files; osora generate looks in ckpts.")
    overwrite: bool = Field(False, description="Replace files that differ from those on the Hub.")
