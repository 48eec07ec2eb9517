"""Render scenes to a folder of clips with captions: python examples/demo/clips.py --out clips.

`osora data scan` makes a table of it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from demo_world.scene_clips import SceneClip
from opensora_cli.media.write import write_media


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the clips."""
    parser = argparse.ArgumentParser(prog="clips.py", description="Render scenes to a folder of clips with captions.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--count", type=int, default=32, help="number of clips (%(default)s)")
    parser.add_argument("--size", type=int, default=128, help="width and height in pixels (%(default)s)")
    parser.add_argument("--num-frames", type=int, default=33, help="frames of a clip (%(default)s)")
    parser.add_argument("--fps", type=float, default=12.0, help="frames per second (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the scenes (%(default)s)")
    parser.add_argument("--held-out", action="store_true", help="scenes that the demo was not trained on")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for number in range(options.count):
        clip = SceneClip(seed=options.seed, number=number, held_out=options.held_out)
        frames = clip.render(size=options.size, num_frames=options.num_frames, fps=options.fps)
        path = options.out / f"{number:04d}.mp4"
        write_media([torch.from_numpy(frames)], path, fps=options.fps, format="mp4")
        path.with_suffix(".txt").write_text(clip.caption + "\n", encoding="utf-8")
    print(f"{options.out}: {options.count} clips")
    return 0


if __name__ == "__main__":
    sys.exit(main())
