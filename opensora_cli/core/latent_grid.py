"""How an autoencoder maps frames and pixels to latents, as plain arithmetic."""

from dataclasses import dataclass

from opensora_cli.core.exceptions import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentGrid:
    """Sizes of the latents of a clip. Ratios are frames to a latent frame, and pixels to a latent along each side.

    If `is_causal`, the first latent frame is the first frame alone, and a clip so has 1 more frame than a multiple of
    `time_compression_ratio`. If not, a clip has a multiple of it, and a single frame is a picture.
    """

    latent_channels: int
    time_compression_ratio: int
    spatial_compression_ratio: int
    is_causal: bool

    def latent_frames(self, num_frames: int) -> int:
        """Return the latent frames of a clip.

        Raises:
            RequestError: no clip has that many frames; the message names the nearest numbers.
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
        """Return height and width of the latents of a picture.
        Raises RequestError if they are no multiples of the compression.
        """
        ratio = self.spatial_compression_ratio
        if min(height, width) < 1 or height % ratio or width % ratio:
            raise RequestError(f"height={height} and width={width} must be multiples of {ratio}")
        return height // ratio, width // ratio

    def num_frames(self, latent_frames: int) -> int:
        """Return the frames that latents are decoded to."""
        ratio = self.time_compression_ratio
        if self.is_causal:
            return (latent_frames - 1) * ratio + 1
        return 1 if latent_frames == 1 else latent_frames * ratio

    def longest_clip(self, num_frames: int) -> int:
        """Return the most frames, up to `num_frames` of at least 1, that come back when they are encoded and decoded.

        A clip of one latent frame is left out where it would come back as a picture.
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
