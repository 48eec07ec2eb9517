"""Validation on held-out clips, and sample videos, during training."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import opensora_cli
from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.conditions import T2V
from opensora_cli.core.device import random_state_kept, release_memory
from opensora_cli.core.exceptions import FileProblem, OutputError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import beat
from opensora_cli.data.batches import ClipBatch, ClipSource, SampleRng
from opensora_cli.data.loading import ClipReader, ReplacementWarnings
from opensora_cli.engine.components.architectures import vae_tiling
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.engine.encode.clips import load_encoders, training_caption
from opensora_cli.engine.encode.datasets import open_table
from opensora_cli.engine.train.build import open_clips_cache
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.early import SAMPLES_FOLDER
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.media.names import file_stem
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.sampling.denoise import denoise
from opensora_cli.sampling.guidance import NO_GUIDANCE, Guidance, guidance_scales
from opensora_cli.sampling.packing import pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import flow_timesteps, noise_latents
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import ValidationSettings

_SAMPLES = "number of samples"
_HOST = torch.device("cpu")


@contextmanager
def evaluating(trainer: Trainer) -> Iterator[None]:
    """Put the module into evaluation mode inside the block: averaged weights, no dropout, no gradients.

    Torch's global generators are restored at the end.
    """
    trainer.task.module.eval()
    try:
        with (
            random_state_kept(trainer.distribution.device),
            trainer.averaged(),
            trainer.distribution.evaluating(),
            torch.no_grad(),
            trainer.autocast(),
        ):
            yield
    finally:
        trainer.task.module.train()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """Validation loss of the weights for export, with the same timesteps and noise every time.

    Each of R ranks computes every R-th micro-batch; the mean over all samples does not depend on R. `read` returns one
    of the `count` micro-batches. A validation is due every few steps and after `last_step`.
    """

    read: Callable[[int], ClipBatch]
    count: int
    settings: ValidationSettings
    last_step: int

    def is_due(self, step: int) -> bool:
        every = self.settings.every
        return every is not None and (step % every == 0 or step == self.last_step)

    def run(self, step: int, trainer: Trainer) -> Mapping[str, float]:
        """Return `loss` and the task's other figures, the same on all ranks. All ranks must call this."""
        distribution, sums, samples = trainer.distribution, dict[str, float](), 0
        with evaluating(trainer):
            for first in range(0, self.count, distribution.data_ranks):
                beat("validate")
                index = first + distribution.data_rank
                # A rank without a batch computes one that does not count because forward passes may be collective.
                batch = self.read(min(index, self.count - 1))
                # The same state for every batch, so that the noise of a clip depends only on its path.
                loss, figures = trainer.task.loss(batch, SampleRng.of(self.settings.seed, 0))
                weight = len(batch.paths) if index < self.count else 0
                samples += weight
                for name, value in {"loss": loss, **figures}.items():
                    sums[name] = sums.get(name, 0.0) + (weight * float(value) if weight else 0.0)
        means = distribution.mean({**sums, _SAMPLES: samples})
        return {name: means[name] / means[_SAMPLES] for name in sums}


def open_validation(
    settings: TrainSettings, *, distribution: Distribution, reporter: Reporter, source: ClipSource | None = None
) -> HeldOutLoss | None:
    """Return the validation of a run on the clips of `source`, or of its table; None if the run has no validation."""
    if settings.validation.every is None:
        return None
    held_out = settings.held_out
    cache = open_clips_cache(held_out, distribution=distribution, reporter=reporter, source=source)
    source = source or open_table(held_out, fixed_starts=cache is not None)
    plan = source.plan_epoch(0)
    count = min(len(plan), settings.validation.batches)
    if not count:
        raise FileProblem(
            f"{settings.validation.table or 'held_out'} fills no micro-batch to validate on",
            hint="give it more clips of each size",
        )
    reader = ClipReader(source, None if cache is None else cache.clip)
    replaced = ReplacementWarnings(reporter, where=" in validation")

    def read(index: int) -> ClipBatch:
        batch = reader.read(plan.batch(index, number=index, epoch=0))
        replaced.warn(batch)
        return batch

    return HeldOutLoss(read=read, count=count, settings=settings.validation, last_step=settings.loop.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleVideos:
    """Generator of a video for each prompt with the weights for export, and the same noise every time.

    All ranks denoise the same latents with their shares of the model; the main rank decodes and writes. `embeds` has
    an entry per prompt, together with the empty prompt. Embeddings, and the autoencoder between uses, are on the host.
    """

    settings: TrainSettings
    embeds: list[PromptEmbeds]
    autoencoder: Autoencoder
    folder: Path
    reporter: Reporter

    def is_due(self, step: int) -> bool:
        every = self.settings.samples.every
        return every is not None and step > 0 and (step % every == 0 or step == self.settings.loop.steps)

    def run(self, step: int, trainer: Trainer) -> Mapping[str, float]:
        """Write the videos `step{n}/PROMPT_seed{s}.mp4`. All ranks must call this.

        A video that cannot be written, for example on a full disk, causes a warning.
        """
        device, latents = trainer.distribution.device, []
        with self.reporter.stage("samples", total=len(self.embeds), unit="videos") as progress:
            for index in range(len(self.embeds)):
                with evaluating(trainer):
                    latents.append(self._latents(index, trainer, device))
                progress.advance()
            if not trainer.distribution.is_main:
                return {}
            self.autoencoder.to(device)
            try:
                for index, latents_1CTHW in enumerate(latents):
                    try:
                        self._write(step, index, latents_1CTHW.to(device))
                    except OutputError as error:
                        self.reporter.warn(f"{error.message}: the video is skipped")
            finally:
                self.autoencoder.to(_HOST)
                release_memory(device)
        return {}

    def _latents(self, index: int, trainer: Trainer, device: torch.device) -> Tensor:
        settings, embeds = self.settings, self.embeds[index]
        chosen, model, grid = settings.samples, settings.model, settings.vae.grid
        # The checked settings have all three sizes.
        num_frames, height, width = (size or 0 for size in (chosen.num_frames, chosen.height, chosen.width))
        frames, (rows, columns) = grid.latent_frames(num_frames), grid.latent_size(height, width)
        # Draw on the host, so that the noise is the same for every device.
        noise_1CTHW = noise_latents(
            [chosen.seed + index],
            num_latent_frames=frames,
            height=height,
            width=width,
            device=_HOST,
            dtype=torch.float32,
            latent_channels=grid.latent_channels,
            spatial_compression=grid.spatial_compression_ratio,
            patch_size=model.patch_size,
        )
        packed_1ND = pack_latents(noise_1CTHW, model.patch_size).to(device)
        no_conditioning = None
        if model.cond_embed:
            no_conditioning = packed_1ND.new_zeros(1, packed_1ND.shape[1], model.in_channels + model.patch_size**2)
        prompt_embeds_2LC, pooled_2V = embeds.prompt_embeds_2LC.to(device), embeds.pooled_prompt_embeds_2V.to(device)
        patches = rows // model.patch_size, columns // model.patch_size
        velocity = GuidedVelocity(
            trainer.task.forward,
            PromptEmbeds(prompt_embeds_2LC.float(), pooled_2V.float()),
            conditioning_BNK=no_conditioning,
            position_ids_1N3=position_ids(1, frames, *patches, device=device),
            embedded_guidance=settings.train_mmdit.embedded_guidance if model.guidance_embed else None,
        )
        timesteps = flow_timesteps(
            chosen.num_inference_steps, tokens_per_frame=patches[0] * patches[1], num_latent_frames=frames
        )
        guidance = NO_GUIDANCE if model.guidance_embed else Guidance(guidance_scale=chosen.guidance_scale)
        scales = guidance_scales(guidance, mode=T2V, timesteps=tuple(timesteps), num_latent_frames=frames)
        packed_1ND = denoise(velocity, packed_1ND, timesteps=timesteps, scales=scales)
        size = {"num_latent_frames": frames, "height": rows, "width": columns, "patch_size": model.patch_size}
        return unpack_latents(packed_1ND, **size).to(_HOST)

    @torch.no_grad()
    def _write(self, step: int, index: int, latents_1CTHW: Tensor) -> None:
        chosen, dtype = self.settings.samples, next(self.autoencoder.parameters()).dtype
        prompt, seed = chosen.prompts[index], chosen.seed + index
        pieces = self.autoencoder.decode_pieces(
            latents_1CTHW.to(dtype), tiling=vae_tiling(self.settings.vae), canvas=_HOST
        )
        software = f"osora {opensora_cli.__version__}"
        write_media(
            (to_uint8(piece_1CTHW[0]).cpu() for piece_1CTHW in pieces),
            self.folder / f"step{step}" / f"{file_stem(prompt, seed=seed)}.mp4",
            fps=chosen.fps or self.settings.data.fps_max,
            format=MediaFormat.MP4,
            metadata={"prompt": prompt, "seed": str(seed), "step": str(step), "software": software},
        )


def open_samples(
    settings: TrainSettings, *, distribution: Distribution, output: Path, reporter: Reporter
) -> SampleVideos | None:
    """Return the generator of sample videos, or None. Call this before the model is built: it loads encoders."""
    chosen, trained = settings.samples, settings.train_mmdit
    if not settings.trains_transformer or chosen.every is None:
        return None
    encoders = load_encoders(settings, device=distribution.device)
    empty = encoders.empty_prompt
    embeds = []
    for prompt in chosen.prompts:
        caption = training_caption(prompt, fps=chosen.fps or settings.data.fps_max, motion_score=None, settings=trained)
        states_2LC = torch.stack([encoders.prompt_embeds(caption), empty.prompt_embeds_LC])
        pooled_2V = torch.stack([encoders.pooled_prompt_embeds(caption), empty.pooled_prompt_embeds_V])
        embeds.append(PromptEmbeds(states_2LC.to(_HOST), pooled_2V.to(_HOST)))
    autoencoder = encoders.autoencoder.to(_HOST)
    del encoders
    release_memory(distribution.device)
    return SampleVideos(
        settings=settings, embeds=embeds, autoencoder=autoencoder, folder=output / SAMPLES_FOLDER, reporter=reporter
    )
