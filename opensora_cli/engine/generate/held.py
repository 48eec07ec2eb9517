"""A finished video in memory, and saving it later as a run would have saved it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike, fspath

import torch

from opensora_cli.engine.generate.decode import (
    Figures,
    GeneratedVideo,
    SampleFrames,
    report_given_frames,
    write_video,
)
from opensora_cli.engine.generate.execution_plan import PICTURE, VIDEO, Chain
from opensora_cli.engine.generate.outputs import check_outputs, first_picture, sample_settings
from opensora_cli.engine.generate.targets import Claims, SampleFiles, find_target, remove_latents, sample_files
from opensora_cli.settings.generate import GenerateSettings


@dataclass(frozen=True, slots=True)
class HeldVideo:
    """One finished sample in memory."""

    chain: Chain
    sample: SampleFiles
    frames_THWC: torch.Tensor
    """uint8 RGB, on the CPU."""
    figures: Figures
    request_sha256: Callable[[int, str], str]
    """See `outputs.request_hashes`, as it was when the video was made."""

    @property
    def settings(self) -> GenerateSettings:
        """What makes this one video again."""
        return sample_settings(self.chain.video, self.sample)

    def save(self, path: str | PathLike[str] | None, *, overwrite: bool) -> GeneratedVideo:
        """Write the video and its sidecar as a run does; what the same request has made there before is kept.

        `path` is a file or a folder, as `output.path`; None: that of the settings.

        Raises:
            pydantic.ValidationError: the ending of `path` is of no known format.
            OutputError: a named file is there already and not to be replaced, or cannot be written.
        """
        changes: dict[str, object] = {"output.overwrite": overwrite or self.chain.settings.output.overwrite}
        if path is not None:
            changes |= {"output.path": fspath(path)}
        settings = self.chain.settings.replace(changes)
        chain = self.chain.change(lambda plan: replace(plan, settings=settings), only=VIDEO)
        start = time.perf_counter()

        def request(seed: int) -> str:
            return self.request_sha256(seed, settings.output_format)

        def figures() -> Figures:
            return replace(self.figures, timings_s={**self.figures.timings_s, "save": time.perf_counter() - start})

        with Claims() as claims:
            check_outputs([sample_files(settings, 0)], chain, create=True)
            sample = find_target(settings, 0, request, claims=claims)
            if sample.made_before:
                return GeneratedVideo.of_earlier_run(chain, sample)
            write_video([self.frames_THWC], chain, sample, figures)
            if sample.saved is not None and sample.latents is not None:
                # Of a run of the same request that did not finish.
                remove_latents(sample.latents)
        return GeneratedVideo(
            path=sample.media,
            sidecar=sample.sidecar,
            seed=sample.seed,
            given_frames_psnr_db=self.figures.given_frames_psnr_db,
            picture=first_picture(chain, sample),
        )


def hold(decoding: SampleFrames, *, request_sha256: Callable[[int, str], str]) -> HeldVideo:
    """Return a sample in memory, whose request `outputs.request_hashes` has described before it was made."""
    frames_THWC = torch.cat([*decoding.pieces()])
    figures = decoding.figures()
    seed, reporter = decoding.sample.seed, decoding.record.reporter
    report_given_frames(
        figures.given_frames_psnr_db, seed, reporter, made_first=decoding.chain.find(PICTURE) is not None
    )
    return HeldVideo(decoding.chain, decoding.sample, frames_THWC, figures, request_sha256)
