"""Small pictures and videos in a folder, with captions, and tables of them: for the tests of data and training."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from opensora_cli.media.write import write_media

FPS = 24.0


def write_clip(
    path: Path, *, num_frames: int = 9, height: int = 64, width: int = 64, fps: float = FPS, caption: str | None = None
) -> Path:
    """Write a video (or a PNG for one frame) whose frames encode their number as brightness."""
    levels = (np.arange(num_frames) * 8 + 20) % 230
    frames = np.broadcast_to(levels[:, None, None, None], (num_frames, height, width, 3)).astype(np.uint8)
    write_media([torch.from_numpy(frames.copy())], path, fps=fps, format="png" if num_frames == 1 else "mp4")
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def frame_number(frame_HWC: torch.Tensor) -> int:
    """Return which frame of a clip by `write_clip` this is, whatever was cut or resized."""
    return round((float(frame_HWC.float().mean()) - 20) / 8)


def write_rows(path: Path, rows: Sequence[Sequence[object]], *, columns: Sequence[str] = ()) -> Path:
    """Write a CSV table; by default its columns are path, text, num_frames, height, width and fps."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns or ["path", "text", "num_frames", "height", "width", "fps"])
        writer.writerows(rows)
    return path


def clip_table(folder: Path, *, clips: int = 6, pictures: int = 4, num_frames: int = 13) -> Path:
    rows: list[list[object]] = []
    for index in range(clips):
        write_clip(folder / f"clip_{index}.mp4", num_frames=num_frames)
        rows.append([f"clip_{index}.mp4", f"clip number {index}", num_frames, 64, 64, FPS])
    for index in range(pictures):
        write_clip(folder / f"picture_{index}.png", num_frames=1)
        rows.append([f"picture_{index}.png", f"picture number {index}", 1, 64, 64, ""])
    return write_rows(folder / "table.csv", rows)
