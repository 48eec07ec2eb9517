"""Settings of the results of `osora generate`."""

from collections.abc import Iterator
from pathlib import PurePath

from pydantic import Field

from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.core.section import Count, FileName, Section
from opensora_cli.settings.enums import NameFrom
from opensora_cli.settings.explain import either

_OTHER_ENDINGS = frozenset(["apng", "avi", "bmp", "jpeg", "jpg", "m4v", "mkv", "mov", "mpeg", "mpg", "tiff", "webm"])
"""Endings that would otherwise become the name of a folder."""


class OutputSettings(Section):
    """Files of results."""

    path: FileName = Field(default="samples", description="Folder, or file to write.")
    format: MediaFormat | None = Field(
        default=None, description="File format. None means by the ending of the path, or mp4, or png for a picture."
    )
    name_from: NameFrom = Field(
        default=NameFrom.SEED,
        description="Names of results in a folder: seed (short prompt and seed) or prompt (full prompt and number).",
    )
    overwrite: bool = Field(default=False, description="Replace existing files.")
    metadata: bool = Field(default=True, description="Write prompt, seed and settings into and beside the file.")
    last_frame: bool = Field(default=False, description="Keep the last frame of a video as NAME.last.png.")
    save_latents: bool = Field(default=True, description="Save latents before decoding and when a run is stopped.")
    save_state_every: Count | None = Field(
        default=None, description="Steps between saves of the latents. Ctrl-C always saves them."
    )
    preview_every: Count | None = Field(
        default=None,
        description="Steps between writes of the predicted video to NAME.preview.gif. None means no previews.",
    )
    explore: bool = Field(default=False, description="Stop all samples early and make a contact sheet of them.")

    @property
    def makes_previews(self) -> bool:
        """Whether predicted videos are shown and kept during sampling."""
        return self.preview_every is not None or self.explore

    @property
    def named_format(self) -> MediaFormat | None:
        """Format that the ending of `path` names, or None for a folder."""
        return named_format(self.path)

    def resolved_format(self, *, num_frames: int) -> MediaFormat:
        """Return the format to write."""
        return self.format or self.named_format or (MediaFormat.PNG if num_frames == 1 else MediaFormat.MP4)

    def rules(self) -> Iterator[str]:
        if self.named_format and self.format and self.named_format is not self.format:
            yield (
                f"output.format={self.format} must agree with the ending of output.path={self.path}: drop one of them"
            )
        if self.explore and not self.save_latents:
            yield "output.explore=true saves latents to continue from: drop output.save_latents=false"
        if _ending(self.path) in _OTHER_ENDINGS:
            yield (
                f"output.path={self.path} must end in {either([f'.{known}' for known in MediaFormat])} to be a file: "
                "use one of these, or name a folder"
            )


def named_format(path: str) -> MediaFormat | None:
    """Return the format that the ending of a file names, or None for a folder."""
    return MediaFormat(_ending(path)) if _ending(path) in list(MediaFormat) else None


def _ending(path: str) -> str:
    return PurePath(path).suffix.lower().removeprefix(".")
