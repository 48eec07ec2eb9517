"""Clips of the procedural world that have a name, as files have a path."""

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from demo_world.captions import sample_caption
from demo_world.scenes import Scene, render_scene, sample_scene

# Apart from the streams of one seed that order an epoch.
_SCENES = 5
_NAME = re.compile(r"(scene|held-out):(\d+)/(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneClip:
    """One clip of the procedural world, by its seed and number."""

    seed: int
    number: int
    held_out: bool = False

    @classmethod
    def named(cls, name: str) -> "SceneClip | None":
        """Return the clip of this `name`; None: it is not the name of one."""
        match = _NAME.fullmatch(name)
        return cls(seed=int(match[2]), number=int(match[3]), held_out=match[1] == "held-out") if match else None

    @property
    def name(self) -> str:
        """Name in place of a path: `scene:SEED/NUMBER`, or `held-out:SEED/NUMBER`."""
        return f"{'held-out' if self.held_out else 'scene'}:{self.seed}/{self.number}"

    @property
    def caption(self) -> str:
        """The scene in words."""
        return self._scene()[1]

    def render(self, *, size: int, num_frames: int, fps: float) -> NDArray[np.uint8]:
        """Return the frames (num_frames, size, size, 3); see `render_scene`."""
        return render_scene(self._scene()[0], size=size, num_frames=num_frames, fps=fps)

    def thing_cover(self, *, size: int, num_frames: int, fps: float) -> NDArray[np.int64]:
        """Return by how much the moving thing changes each pixel, of 255 and summed over the colours:
        (num_frames, size, size), 0 without one.
        """
        scene = self._scene()[0]
        shown, empty = (
            render_scene(each, size=size, num_frames=num_frames, fps=fps).astype(np.int64)
            for each in (scene, replace(scene, thing=None))
        )
        cover_THW: NDArray[np.int64] = np.abs(shown - empty).sum(axis=-1)
        return cover_THW

    def _scene(self) -> tuple[Scene, str]:
        rng = np.random.default_rng((self.seed, self.number, _SCENES))
        scene = sample_scene(rng, held_out=self.held_out)
        return scene, sample_caption(scene, rng)
