"""Procedural scenes as a source of training clips."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from demo_world.scene_clips import SceneClip
from demo_world.settings import SceneSettings
from opensora_cli.core.exceptions import MediaError
from opensora_cli.data.batches import ClipRequest, EpochPlan

# Independent random streams of one seed.
_KINDS = 2
_ORDER = 3


@dataclass(frozen=True, slots=True)
class SceneSource:
    """`ClipSource` of scenes: bucket 0 has the clips, bucket 1 the single frames."""

    scenes: SceneSettings
    seed: int
    held_out: bool = False
    """Scenes of combinations that are never trained on."""

    @property
    def fingerprint(self) -> str:
        """Hash of settings and seed."""
        parts = [self.scenes.model_dump(mode="json"), self.seed, self.held_out]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Return the order of an epoch. In each, other scenes are single frames."""
        scenes = self.scenes
        pictures = self._rng(epoch, _KINDS).permutation(scenes.count) < round(scenes.picture_share * scenes.count)
        sizes = np.array([scenes.batch_size, scenes.picture_batch_size], dtype=np.int64)
        return EpochPlan(pictures.astype(np.int32), sizes, rng=self._rng(epoch, _ORDER))

    def request(self, sample: int, *, bucket: int, number: int, place: int) -> ClipRequest:
        """Return the clip with number `sample`, or its first frame."""
        scenes = self.scenes
        clip = SceneClip(seed=self.seed, number=sample, held_out=self.held_out)
        is_picture = bucket == 1 or scenes.num_frames == 1
        return ClipRequest(
            path=clip.name,
            caption=clip.caption,
            motion_score=None,
            start=0,
            interval=1,
            num_frames=1 if is_picture else scenes.num_frames,
            height=scenes.size,
            width=scenes.size,
            fps=0.0 if is_picture else scenes.fps,
        )

    def requests(self) -> Iterator[ClipRequest]:
        """Yield the clip of each scene, and its first frame, if any epoch asks for them."""
        buckets = [int(length == 1 < self.scenes.num_frames) for length in self.scenes.kinds]
        # One kind after the other: ranks that take every n-th request then share both kinds evenly.
        for bucket in buckets:
            for sample in range(self.scenes.count):
                yield self.request(sample, bucket=bucket, number=0, place=0)

    def read(self, request: ClipRequest) -> Tensor:
        """Render a scene."""
        clip = SceneClip.named(request.path)
        if clip is None:
            raise MediaError(f"{request.path} is not the name of a scene")
        fps = request.fps or 1.0  # any rate renders the same single frame
        return torch.from_numpy(clip.render(size=request.height, num_frames=request.num_frames, fps=fps))

    def _rng(self, epoch: int, stream: int) -> Generator:
        return np.random.default_rng((self.seed, epoch, stream))
