"""Choices of media that settings offer and `media` implements, which must not import each other."""

from enum import StrEnum


class MediaFormat(StrEnum):
    """File format of a result. Each value is also its file ending."""

    MP4 = "mp4"
    GIF = "gif"
    WEBP = "webp"
    PNG = "png"


class Fit(StrEnum):
    """How a reference of another shape is fitted to the video."""

    CROP = "crop"
    PAD = "pad"
    STRETCH = "stretch"
