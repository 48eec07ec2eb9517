"""Reading clips: what the workers of training do."""

from collections.abc import Callable, Iterator
from ctypes import addressof, c_char, memmove
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from opensora_cli.core.exceptions import FileProblem, OsoraError
from opensora_cli.data.batches import ClipBatch, ClipRequest, MicroBatch, Replacement
from opensora_cli.data.scenes import SceneClip
from opensora_cli.engine.encode.datasets import ClipRequests
from opensora_cli.media.read import read_cut
from opensora_cli.media.resize import Fit, fit_frames

_NOTE_BYTES = 512

LoadClip = Callable[[ClipRequest], Any]
"""Takes the place of decoding, as a cache does. An `OsoraError` says that this sample cannot be had."""


def read_clip(request: ClipRequest, *, fit: Fit | str = Fit.CROP) -> Tensor:
    """Return the frames of a request, uint8 (T, H, W, 3): decoded and resized, or rendered.

    Raises:
        MediaError: the file is missing or broken, or too short.
    """
    scene = SceneClip.named(request.path)
    if scene is not None:
        fps = request.fps or 1.0  # of a single frame it does not matter
        return torch.from_numpy(scene.render(size=request.height, num_frames=request.num_frames, fps=fps))
    frames = read_cut(request.path, start=request.start, num_frames=request.num_frames, interval=request.interval)
    is_picture = request.num_frames == 1
    # Frame by frame, so that of a large video no more than one is held at its own size.
    return torch.stack(
        [_fitted(frame, height=request.height, width=request.width, fit=fit, picture=is_picture) for frame in frames]
    )


def _fitted(frame_HWC: Tensor, *, height: int, width: int, fit: Fit | str, picture: bool) -> Tensor:
    pixels_C1HW = fit_frames(frame_HWC[None], height=height, width=width, fit=fit, picture=picture)
    # Eight bits are a quarter of what has to go from process to process, and on to the device.
    levels_HWC = ((pixels_C1HW[:, 0] + 1) * 127.5).round().permute(1, 2, 0)
    return levels_HWC.to(torch.uint8)


class ReadingNotes:
    """What each worker is reading, in memory that they share: a decoder that crashes can name its file no more.

    Args:
        workers: how many there are; 0: none.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._notes = RawArray(c_char, max(workers, 1) * _NOTE_BYTES)

    def note(self, path: str) -> None:
        """Note what this process reads, if it is a worker."""
        worker = get_worker_info()
        if worker is not None:
            # The end of a long path tells more than its beginning.
            content = path.encode("utf-8", "surrogateescape")[-_NOTE_BYTES:]
            memmove(addressof(self._notes) + worker.id * _NOTE_BYTES, content.ljust(_NOTE_BYTES, b"\0"), _NOTE_BYTES)

    def paths(self) -> list[str]:
        """Return what the workers noted last."""
        content = bytes(self._notes)
        notes = (content[index * _NOTE_BYTES : (index + 1) * _NOTE_BYTES] for index in range(self._workers))
        return [path for note in notes if (path := note.rstrip(b"\0").decode("utf-8", "replace"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLoader:
    """Reads micro-batches.

    A sample that cannot be read is replaced by the first of the batch's substitutes that can: the same ones in every
    run, so that a run that was resumed repeats one that was not.
    """

    requests: ClipRequests
    fit: Fit | str
    load: LoadClip | None
    """None: frames are decoded."""
    notes: ReadingNotes

    def __call__(self, asked: MicroBatch) -> ClipBatch:
        """Read one micro-batch.

        Raises:
            FileProblem: a sample cannot be read, and none of its substitutes either.
        """
        substitutes = iter(asked.substitutes)
        replaced: list[Replacement] = []
        clips = [self._read(asked, place, substitutes, replaced) for place in range(len(asked.samples))]
        requests = [request for request, _ in clips]
        contents = [content for _, content in clips]
        return ClipBatch(
            number=asked.number,
            epoch=asked.epoch,
            paths=tuple(request.path for request in requests),
            captions=tuple(request.caption for request in requests),
            fps=tuple(request.fps for request in requests),
            motion_scores=tuple(request.motion_score for request in requests),
            pixels_BTHWC=torch.stack(contents) if self.load is None else None,
            cached=None if self.load is None else tuple(contents),
            replaced=tuple(replaced),
        )

    def _read(
        self, asked: MicroBatch, place: int, substitutes: Iterator[int], replaced: list[Replacement]
    ) -> tuple[ClipRequest, Any]:
        failures: list[tuple[str, str]] = []
        sample: int | None = asked.samples[place]
        while sample is not None:
            request = self.requests.request(sample, bucket=asked.bucket, number=asked.number, place=place)
            try:
                content = self._content(request)
            except OsoraError as error:
                failures.append((request.path, error.message))
                sample = next(substitutes, None)
                continue
            except Exception as error:
                error.add_note(f"while reading {request.path}")
                raise
            replaced += [Replacement(path=path, reason=reason, by=request.path) for path, reason in failures]
            return request, content
        path, reason = failures[0]
        raise FileProblem(
            f"{reason} (sample {path}; {len(failures) - 1} others of its bucket cannot be read in its place)",
            hint="osora data scan makes a table without broken files",
        )

    def _content(self, request: ClipRequest) -> Any:
        self.notes.note(request.path)
        return read_clip(request, fit=self.fit) if self.load is None else self.load(request)
