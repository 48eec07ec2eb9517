"""Choices of media, shared by settings and `media`, which must not import each other."""

from enum import StrEnum


class MediaFormat(StrEnum):
    """File format of a result. Each value is also its file ending."""

    MP4 = "mp4"
    GIF = "gif"
    WEBP = "webp"
    PNG = "png"


class Fit(StrEnum):
    """Method that fits a reference of another shape to the video."""

    CROP = "crop"
    PAD = "pad"
    STRETCH = "stretch"
