"""Memory of the decoder, without running all tiles and frames."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from opensora_cli.engine.estimate.outlines import clip_layout
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.chunked import StoredClip, convolve, last_stage, run_stage, stages_of
from opensora_cli.models.vae.hunyuan import Decoder
from opensora_cli.models.vae.hunyuan_blocks import Upsample
from opensora_cli.models.vae.resample import folded_kernels


class _Chunk(NamedTuple):
    num_frames: int
    layout: torch.memory_format


@dataclass(frozen=True, slots=True)
class _Clip:
    """Sizes of a clip between two stages."""

    channels: int
    height: int
    width: int
    chunks: tuple[_Chunk, ...]

    @classmethod
    def of(cls, chunks: Iterable[Tensor]) -> "_Clip":
        # One chunk at a time, since each moves from the store to the device.
        outlines = [(chunk.shape, clip_layout(chunk)) for chunk in chunks]
        _, channels, _, height, width = outlines[0][0]
        return cls(channels, height, width, tuple(_Chunk(shape[2], layout) for shape, layout in outlines))


_Run = Callable[[Tensor, _Clip], tuple[int, _Clip]]
"""Function from a tile's latents and a stage's input clip to the peak in bytes and the output clip."""


class _Stage(NamedTuple):
    kind: object
    """Key of the stage: stages with equal keys do the same to equal clips."""
    run: _Run


class _Seen(NamedTuple):
    """Input and memory of a stage for the first tile with a number of frames."""

    stage: _Stage
    clip: _Clip
    peak_bytes: int


class FakeDecoder(nn.Module):
    """Stand-in that allocates like the decoder of `vae`, which has fake weights. Call it inside `fake_device`.

    In chunks, a clip passes from stage to stage. Each stage runs by itself, on two short clips; the need of a longer
    clip follows from them. `counter` finds the peak while tiles are decoded; stages that cannot change it are skipped.
    With `only_pixels` no stage allocates anything. The other arguments are those of `Autoencoder.decode`.
    """

    def __init__(
        self,
        vae: Autoencoder,
        counter: TensorBytes,
        *,
        chunk_frames: int | None,
        store: torch.device,
        canvas: torch.device,
        only_pixels: bool = False,
    ) -> None:
        super().__init__()
        self._only_pixels = only_pixels
        self._grid, self._channels, self._counter = vae.grid, vae.last_layer.out_channels, counter
        self._chunk_frames, self._store, self._canvas = chunk_frames, store, canvas
        # Only a `Decoder` runs in chunks.
        self._decoder = cast(Decoder, vae.decoder)
        self._known: dict[tuple[object, _Clip], tuple[int, _Clip]] = {}
        self._seen: dict[int, list[_Seen]] = {}

    def forward(
        self,
        latents_BCTHW: Tensor,
        *,
        chunk_frames: int | None = None,
        store: torch.device | None = None,
        canvas: torch.device | None = None,
    ) -> Tensor:
        """Return the pixels of a tile, which is not larger than the first in height and width. Options are ignored."""
        batch, _, frames, height, width = latents_BCTHW.shape
        if frames not in self._seen and not self._only_pixels:
            self._seen[frames] = list(self._run_all(latents_BCTHW))
        for stage, clip, peak_bytes in self._seen.get(frames, ()):
            first = self._seen[frames][0].clip
            # No tile needs more than the first.
            if self._counter.live_bytes + peak_bytes > self._counter.peak_bytes:
                rows, columns = clip.height // first.height * height, clip.width // first.width * width
                peak_bytes, _ = self._run(latents_BCTHW, stage, replace(clip, height=rows, width=columns))
                torch.empty(peak_bytes, dtype=torch.uint8, device=latents_BCTHW.device)
        space = self._grid.spatial_compression_ratio
        pixels = batch, self._channels, self._grid.num_frames(frames), height * space, width * space
        return torch.empty(pixels, dtype=latents_BCTHW.dtype, device=self._canvas)

    def _run_all(self, latents_BCTHW: Tensor) -> Iterator[_Seen]:
        length = self._chunk_frames
        if length is None and isinstance(self._decoder, Decoder):
            length = self._decoder.chunk_frames_for(latents_BCTHW)
        clip = _Clip.of(torch.split(latents_BCTHW, length or latents_BCTHW.shape[2], dim=2))
        for stage in _stages(self._decoder, self._counter, length, self._store, self._canvas):
            peak_bytes, out = self._run(latents_BCTHW, stage, clip)
            yield _Seen(stage, clip, peak_bytes)
            clip = out

    def _run(self, latents_BCTHW: Tensor, stage: _Stage, clip: _Clip) -> tuple[int, _Clip]:
        key = stage.kind, clip
        if key not in self._known:
            self._known[key] = _run_shortened(partial(stage.run, latents_BCTHW), clip)
        return self._known[key]


def _stages(
    decoder: Decoder, counter: TensorBytes, chunk_frames: int | None, store: torch.device, canvas: torch.device
) -> Iterator[_Stage]:
    """Yield the stages of `chunked.run_in_chunks`; without chunks the whole decoder is one stage."""

    def stored(like: Tensor, clip: _Clip) -> StoredClip:
        empty = partial(torch.empty, dtype=like.dtype, device=like.device)
        chunks = (
            empty((len(like), clip.channels, chunk.num_frames, clip.height, clip.width), memory_format=chunk.layout)
            for chunk in clip.chunks
        )
        return StoredClip(chunks, store=store)

    def counted(run: Callable[[], StoredClip | Tensor]) -> tuple[int, _Clip]:
        before = counter.live_bytes
        counter.mark("before a stage")
        out = run()
        counter.mark("after a stage")
        out_chunks = [out] if isinstance(out, Tensor) else out.chunks()
        return counter.marks[-1].peak_bytes - before, _Clip.of(out_chunks)

    def whole(latents_BCTHW: Tensor, clip: _Clip) -> tuple[int, _Clip]:
        return counted(lambda: decoder(latents_BCTHW, canvas=canvas))

    if chunk_frames is None:
        yield _Stage("whole", whole)
        return
    length = chunk_frames

    def first(latents_BCTHW: Tensor, clip: _Clip) -> tuple[int, _Clip]:
        num_frames = sum(chunk.num_frames for chunk in clip.chunks)
        chunks = torch.split(latents_BCTHW[:, :, :num_frames], length, dim=2)
        return counted(lambda: StoredClip(convolve(chunks, decoder.conv_in), store=store))

    def between(layers: Sequence[nn.Module], like: Tensor, clip: _Clip) -> tuple[int, _Clip]:
        def run() -> StoredClip:
            chunks = run_stage(stored(like, clip), layers, chunk_frames=length, store=store)
            return StoredClip(chunks, store=store)

        for layer in layers:
            if isinstance(layer, Upsample):  # its kernels exist already when the second clip runs
                folded_kernels(layer.conv.conv, (layer.time, layer.space, layer.space))
        return counted(run)

    def last(like: Tensor, clip: _Clip) -> tuple[int, _Clip]:
        norm, conv = decoder.conv_norm_out, decoder.conv_out
        return counted(lambda: last_stage(stored(like, clip), norm, conv, canvas=canvas))

    yield _Stage("first", first)
    for layers in stages_of(decoder.layers()):
        yield _Stage(tuple(map(repr, layers)), partial(between, layers))
    yield _Stage("last", last)


def _run_shortened(run: Callable[[_Clip], tuple[int, _Clip]], clip: _Clip) -> tuple[int, _Clip]:
    """Return the result of `run` for a long clip, derived from two shorter ones: most chunks are treated equally.

    The longest series of equal chunks is cut to a few, and then to one more. The cost of this one is added for each
    missing chunk.
    """
    series = max((list(same) for _, same in groupby(enumerate(clip.chunks), lambda item: item[1])), key=len)
    start, end = series[0][0], series[-1][0] + 1
    # With two chunks, one follows an equally long one; the very first chunk follows none.
    few = 2 if start else 3
    missing = len(series) - few - 1
    if missing < 1:
        return run(clip)
    (peak, out), (next_peak, next_out) = (
        run(replace(clip, chunks=clip.chunks[: start + count] + clip.chunks[end:])) for count in (few, few + 1)
    )
    chunks = next_out.chunks
    same = takewhile(lambda pair: pair[0] == pair[1], zip(out.chunks, chunks, strict=False))
    position = len(list(same))
    more = chunks[position : position + len(chunks) - len(out.chunks)]
    return (
        next_peak + missing * (next_peak - peak),
        replace(out, chunks=chunks[:position] + more * missing + chunks[position:]),
    )
