"""Arithmetic of the sizes of latents: from frames and pixels to latents, and back."""

from dataclasses import dataclass

from opensora_cli.core.exceptions import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentGrid:
    """Sizes of the latents of a clip. Ratios are frames per latent frame, and pixels per latent along each side.

    If `is_causal`, the first latent frame encodes the first frame alone, and a clip has 1 frame more than a multiple of
    `time_compression_ratio`. Otherwise the number of frames is a multiple of it, or 1 for a picture.
    """

    latent_channels: int
    time_compression_ratio: int
    spatial_compression_ratio: int
    is_causal: bool

    def latent_frames(self, num_frames: int) -> int:
        """Return the number of latent frames of a clip.

        Raises:
            RequestError: A clip cannot have this number of frames. The message names the nearest numbers.
        """
        ratio = self.time_compression_ratio
        if num_frames < 1:
            raise RequestError(f"num_frames={num_frames} must be at least 1")
        if self.is_causal:
            self._check_frames(num_frames, rest=1, rule=f"1 more than a multiple of {ratio}")
            return (num_frames - 1) // ratio + 1
        if num_frames == 1:
            return 1
        self._check_frames(num_frames, rest=0, rule=f"1, or a multiple of {ratio}")
        return num_frames // ratio

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the latents of a picture.
        Raises RequestError if the sides are not multiples of the compression ratio.
        """
        ratio = self.spatial_compression_ratio
        if min(height, width) < 1 or height % ratio or width % ratio:
            raise RequestError(f"height={height} and width={width} must be multiples of {ratio}")
        return height // ratio, width // ratio

    def num_frames(self, latent_frames: int) -> int:
        """Return the number of frames that latents are decoded to."""
        ratio = self.time_compression_ratio
        if self.is_causal:
            return (latent_frames - 1) * ratio + 1
        return 1 if latent_frames == 1 else latent_frames * ratio

    def longest_clip(self, num_frames: int) -> int:
        """Return the largest number of frames, up to `num_frames` of at least 1, that encoding and decoding keep.

        A clip of one latent frame is skipped if it would be decoded as a picture.
        """
        ratio = self.time_compression_ratio
        if self.is_causal:
            return self.num_frames((num_frames - 1) // ratio + 1)
        return self.num_frames(max(1, num_frames // ratio))

    def _check_frames(self, num_frames: int, *, rest: int, rule: str) -> None:
        ratio = self.time_compression_ratio
        if num_frames % ratio != rest % ratio:
            below = (num_frames - rest) // ratio * ratio + rest
            raise RequestError(f"num_frames={num_frames} must be {rule}: use {max(below, 1)} or {below + ratio}")
