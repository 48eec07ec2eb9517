"""Settings of where the results of `osora generate` go."""

from pathlib import PurePath
from typing import Self

from pydantic import Field, model_validator

from opensora_cli.settings.base import Section
from opensora_cli.settings.enums import NameFrom, OutputFormat
from opensora_cli.settings.explain import either

# Endings that people type and that would otherwise quietly become the name of a folder.
_FOREIGN_ENDINGS = frozenset({"apng", "avi", "bmp", "jpeg", "jpg", "m4v", "mkv", "mov", "mpeg", "mpg", "tiff", "webm"})


class OutputSettings(Section):
    """Where results go."""

    path: str = Field(default="samples", min_length=1, description="a folder, or a file name with a known ending")
    format: OutputFormat | None = Field(
        default=None, description="none: from the file's ending, else mp4, and png of a picture"
    )
    name_from: NameFrom = Field(
        default=NameFrom.SEED,
        description="of results in a folder: seed for the prompt, shortened, and the seed; prompt for the prompt as it "
        "is, and the number of the sample",
    )
    overwrite: bool = Field(default=False, description="replace existing files")
    metadata: bool = Field(default=True, description="write prompt, seed and settings beside and into the file")
    last_frame: bool = Field(default=False, description="keep the last frame beside a video, as NAME.last.png")
    save_latents: bool = Field(default=True, description="save the latents before decoding, and where a run is stopped")
    save_state_every: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="steps after which the latents are saved, to go on from; none: only at the end",
    )
    preview_every: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="steps between previews of the predicted video, NAME.preview.gif; none: no previews",
    )
    explore: bool = Field(
        default=False,
        description="begin all samples to choose from: leave them stopped early and not decoded, with a sheet of them",
    )

    @property
    def makes_previews(self) -> bool:
        """Whether what is predicted on the way is shown and kept."""
        return self.preview_every is not None or self.explore

    @property
    def named_format(self) -> OutputFormat | None:
        """The format that the ending of `path` names; None where `path` is a folder."""
        ending = PurePath(self.path).suffix.lower().removeprefix(".")
        return OutputFormat(ending) if ending in list(OutputFormat) else None

    def resolved_format(self, *, num_frames: int) -> OutputFormat:
        """Return the format to write."""
        return self.format or self.named_format or (OutputFormat.PNG if num_frames == 1 else OutputFormat.MP4)

    @model_validator(mode="after")
    def _ending_agrees(self) -> Self:
        named = self.named_format
        if named and self.format and named is not self.format:
            raise ValueError(
                f"output.format={self.format} must agree with the ending of output.path={self.path}: drop one of them"
            )
        if self.save_state_every is not None and not self.save_latents:
            raise ValueError(
                f"output.save_state_every={self.save_state_every} has no effect with output.save_latents=false: drop it"
            )
        if self.explore and not self.save_latents:
            raise ValueError("output.explore=true leaves latents to go on from: drop output.save_latents=false")
        if PurePath(self.path).suffix.lower().removeprefix(".") in _FOREIGN_ENDINGS:
            raise ValueError(
                f"output.path={self.path} must end in {either([f'.{known}' for known in OutputFormat])} to be a file: "
                "use one of these, or name a folder"
            )
        return self
