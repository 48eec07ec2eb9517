"""Settings of `osora ckpt`: one class for each of its commands."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import PurePath

from pydantic import Field

from opensora_cli.core.choices import QKV, Format, Selection
from opensora_cli.core.section import ByteSize, FileName, Section
from opensora_cli.models.registry import DOWNLOADS, DownloadName


class WeightDType(StrEnum):
    """Floating point type of written weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


_FORMAT_OF_ENDING = {".safetensors": Format.SAFETENSORS} | dict.fromkeys((".pt", ".pth", ".bin"), Format.TORCH)


class InspectSettings(Section):
    """Settings of `osora ckpt inspect`."""

    path: FileName = Field(description="File or folder.")
    select: Selection | None = Field(None, description="Weights of a training to use. None: model.")
    all: bool = Field(False, description="Print a row for each tensor, too.")


class VerifySettings(Section):
    """Settings of `osora ckpt verify`."""

    path: FileName = Field(description="File or folder.")
    preset: str | None = Field(None, description="Require names and shapes of a released model.")


class WriteSettings(Section):
    """Place and format of written weights."""

    target: FileName = Field(description="File or folder to write.")
    format: Format | None = Field(None, description="Format to write. None: by the ending, else safetensors shards.")
    shard_size: ByteSize | None = Field(None, description="Size of a shard, as in 4GB. None means 4096 MiB.")
    overwrite: bool = Field(False, description="Replace an existing file.")

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
    drop: tuple[FileName, ...] = Field((), description="Drop tensors named like 'double_blocks.*' in SRC.")
    rename: tuple[str, ...] = Field((), description="Replace the start of names.")
    qkv: QKV | None = Field(None, description="Write q, k and v as in Flux (fused) or Open-Sora (split).")
    dtype: WeightDType | None = Field(None, description="Dtype of all floating point weights.")

    @property
    def options(self) -> dict[str, object]:
        """Options that the result depends on, if given."""
        given = self.model_dump(mode="json", include={"select", "drop", "rename", "qkv", "dtype"})
        return {name: value for name, value in given.items() if value}


class MergeLoraSettings(WriteSettings):
    """Settings of `osora ckpt merge-lora`."""

    base: FileName = Field(description="File or folder of the model.")
    adapter: FileName = Field(description="PEFT folder, or a diffusers, ComfyUI or kohya file.")
    scale: float = Field(1.0, ge=-100, le=100, description="Factor of the adapter. -1 removes it from BASE again.")

    @property
    def options(self) -> dict[str, object]:
        """Options that the result depends on."""
        return {"adapter": self.adapter, "scale": self.scale}


class DownloadSettings(Section):
    """Settings of `osora ckpt download`."""

    preset: DownloadName = Field(description=f"Model to download: {', '.join(DOWNLOADS)}.")
    to: FileName = Field("ckpts", description="Folder for the files; osora generate looks in ckpts.")
    overwrite: bool = Field(False, description="Replace files that differ from those on the Hub.")
