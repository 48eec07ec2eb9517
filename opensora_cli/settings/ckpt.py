"""Settings of `osora ckpt`: one class for each of its commands."""

import re
from pathlib import PurePath
from typing import Annotated, Self

from pydantic import Field, model_validator

from opensora_cli.settings.base import ByteSize, Section
from opensora_cli.settings.enums import (
    DownloadPreset,
    QKVLayout,
    RotaryLayout,
    TargetFormat,
    WeightDType,
    WeightSelection,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FORMAT_OF_ENDING = {
    ".safetensors": TargetFormat.SAFETENSORS,
    ".pt": TargetFormat.TORCH,
    ".pth": TargetFormat.TORCH,
    ".bin": TargetFormat.TORCH,
}


Patterns = tuple[Annotated[str, Field(min_length=1)], ...]


class InspectSettings(Section):
    """`osora ckpt inspect`."""

    path: str = Field(min_length=1, description="file or folder")
    select: WeightSelection | None = Field(default=None, description="which weights of a training")
    only: Patterns = Field(default=(), description="shell patterns of names; nothing else is shown")
    stats: bool = Field(default=False, description="read the data, too: range, mean, what is not finite or all zero")


class VerifySettings(Section):
    """`osora ckpt verify`."""

    path: str = Field(min_length=1, description="file or folder")
    select: WeightSelection | None = Field(default=None, description="which weights of a training")
    preset: str | None = Field(default=None, description="released model whose names and shapes it must have")
    sha256: str | None = Field(default=None, description="what the hash of the one file must be")
    data: bool = Field(default=True, description="read all data, to check hashes and find what is not finite")

    @model_validator(mode="after")
    def _hash_can_be_checked(self) -> Self:
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256.lower()):
            raise ValueError(f"sha256={self.sha256} must be 64 hexadecimal digits")
        if self.sha256 is not None and not self.data:
            raise ValueError("sha256 cannot be checked with data=false, which reads nothing: drop one of them")
        return self


class DiffSettings(Section):
    """`osora ckpt diff`."""

    first: str = Field(min_length=1, description="file or folder")
    second: str = Field(min_length=1, description="file or folder")
    select: WeightSelection | None = Field(default=None, description="which weights, of a training among the two")
    only: Patterns = Field(default=(), description="shell patterns of names; nothing else is compared")
    rtol: float = Field(
        default=0.0,
        ge=0,
        le=1e38,
        allow_inf_nan=False,
        description="what may differ, relative to the value in the second",
    )
    atol: float = Field(default=0.0, ge=0, le=1e38, allow_inf_nan=False, description="what may differ, absolutely")

    @property
    def is_exact(self) -> bool:
        """Whether every bit must be the same."""
        return self.rtol == self.atol == 0


class WriteSettings(Section):
    """Where weights are written to, and how."""

    target: str = Field(min_length=1, description="file or folder to write")
    format: TargetFormat | None = Field(default=None, description="what to write; None: goes by the target's name")
    shard_size: ByteSize | None = Field(default=None, description="bytes of a shard, as in 4GB; None: 4096 MiB")
    hashing: bool = Field(default=True, description="record the hash of the source, and of each shard")
    overwrite: bool = Field(default=False, description="replace what is there")

    @property
    def resolved_format(self) -> TargetFormat:
        """The given format, or else that of the target's name."""
        return self.format or self.named_format or TargetFormat.SAFETENSORS_SHARDS

    @property
    def named_format(self) -> TargetFormat | None:
        """The format of the target's ending, if it is a known one."""
        return _FORMAT_OF_ENDING.get(PurePath(self.target).suffix.lower())

    @model_validator(mode="after")
    def _format_is_known(self) -> Self:
        # Letters after a dot are an ending; `v1.5` is a name.
        ending = PurePath(self.target).suffix
        if self.format is None and self.named_format is None and ending[1:2].isalpha():
            raise ValueError(f"target={self.target} has an ending, {ending}, that names no format: add --format")
        return self

    @model_validator(mode="after")
    def _format_fits(self) -> Self:
        written, named = self.resolved_format, self.named_format
        if named is not None and written is not named:
            raise ValueError(
                f"format={written} must agree with the ending of target={self.target}, which is that of {named}: "
                f"use another name"
            )
        if self.shard_size is not None and not written.has_shards:
            sharded = ", ".join(format_ for format_ in TargetFormat if format_.has_shards)
            raise ValueError(f"shard_size={self.shard_size} has no effect on format={written}: use one of {sharded}")
        return self


class ConvertSettings(WriteSettings):
    """`osora ckpt convert`."""

    source: str = Field(min_length=1, description="file or folder to read")
    select: WeightSelection | None = Field(default=None, description="which weights of a training")
    only: Patterns = Field(default=(), description="shell patterns of names in the source; nothing else is written")
    drop: Patterns = Field(default=(), description="shell patterns of names in the source that are left out")
    rename: tuple[str, ...] = Field(
        default=(), description="OLD=NEW for the start of names, re:PATTERN=NEW for a regular expression"
    )
    qkv: QKVLayout | None = Field(default=None, description="layout of q, k and v; None: as it is")
    rotary: RotaryLayout | None = Field(default=None, description="layout of rotary pairs; None: as it is")
    dtype: WeightDType | None = Field(default=None, description="of all floating point weights; None: as they are")
    preset: str | None = Field(default=None, description="released model whose names and shapes the result must have")

    @property
    def options(self) -> dict[str, object]:
        """The options that the result depends on, where given."""
        given = self.model_dump(mode="json", include={"select", "only", "drop", "rename", "qkv", "rotary", "dtype"})
        return {name: value for name, value in given.items() if value}


class MergeLoraSettings(WriteSettings):
    """`osora ckpt merge-lora`."""

    base: str = Field(min_length=1, description="file or folder of the model")
    adapter: str = Field(min_length=1, description="folder or file of the adapter")
    unmerge: bool = Field(default=False, description="take the adapter out again")
    scale: float = Field(
        default=1.0, ge=-100, le=100, allow_inf_nan=False, description="how much of the adapter; 1 is as it was trained"
    )

    @property
    def options(self) -> dict[str, object]:
        """What its result depends on, beside the files."""
        return {"adapter": self.adapter, "unmerge": self.unmerge, "scale": self.scale}


class DownloadSettings(Section):
    """`osora ckpt download`."""

    preset: DownloadPreset = Field(description="what to download")
    to: str = Field(default="ckpts", min_length=1, description="folder to put the files in")
    overwrite: bool = Field(default=False, description="replace files that are other than on the Hub")
