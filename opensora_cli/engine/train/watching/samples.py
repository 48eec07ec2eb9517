"""Sample videos of the model in training."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opensora_cli
from opensora_cli.core.conditions import T2V
from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.files import remove
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.autoencoders import vae_tiling
from opensora_cli.engine.components.hardware import release_memory
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.engine.encode.clips import training_caption
from opensora_cli.engine.encode.encoders import load_encoders
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.files import SAMPLES_FOLDER
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.engine.train.watching.validation import evaluating
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.sampling.denoise import denoise
from opensora_cli.sampling.guidance import NO_GUIDANCE, Guidance, guidance_scales
from opensora_cli.sampling.packing import pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import flow_timesteps, noise_latents
from opensora_cli.settings.train import TrainSettings, TrainTarget

_HOST = torch.device("cpu")


class SampleVideos:
    """Makes a video of each prompt with the weights that will be exported: the average, if there is one.

    All ranks denoise the same latents with their shares of the model; the main rank decodes and writes. The noise of a
    prompt is the same every time. The random state and the weights of training are not changed. `embeds` are those of
    each prompt, with those of the empty one; they are on the host, as is the autoencoder while it is not decoding.
    """

    def __init__(
        self,
        settings: TrainSettings,
        *,
        embeds: list[PromptEmbeds],
        autoencoder: Autoencoder,
        folder: Path,
        reporter: Reporter,
    ) -> None:
        shape = settings.samples.shape(settings.data)
        assert shape is not None
        self._num_frames, self._height, self._width = shape
        self._settings = settings
        self._embeds = embeds
        self._autoencoder = autoencoder
        self._folder = folder
        self._reporter = reporter

    def is_due(self, step: int) -> bool:
        """Whether samples are due after so many steps."""
        every = self._settings.samples.every
        return every is not None and step > 0 and (step % every == 0 or step == self._settings.loop.steps)

    def run(self, step: int, trainer: Trainer[Any]) -> list[Path]:
        """Make the videos `step{n}/0.mp4`, `1.mp4` and so on, and return their paths; all ranks call this.

        One that cannot be written, as on a full disk, is warned about and left out.
        """
        device = trainer.distribution.device
        with self._reporter.stage("samples", total=len(self._embeds), unit="videos") as progress:
            latents = []
            for index in range(len(self._embeds)):
                with evaluating(trainer):
                    latents.append(self._latents(index, trainer, device))
                progress.advance()
            return self._write_all(step, latents, device) if trainer.distribution.is_main else []

    def _latents(self, index: int, trainer: Trainer[Any], device: torch.device) -> Tensor:
        settings, patch_size = self._settings, self._settings.model.patch_size
        chosen, grid = settings.samples, settings.vae.grid
        frames = grid.latent_frames(self._num_frames)
        rows, columns = grid.latent_size(self._height, self._width)
        # On the host, so that it is the same for every device.
        noise_1CTHW = noise_latents(
            [chosen.seed + index],
            num_latent_frames=frames,
            height=self._height,
            width=self._width,
            device=_HOST,
            dtype=torch.float32,
            latent_channels=grid.latent_channels,
            spatial_compression=grid.spatial_compression_ratio,
            patch_size=patch_size,
        )
        packed_1ND = pack_latents(noise_1CTHW, patch_size).to(device)
        distilled = settings.model.guidance_embed
        velocity = GuidedVelocity(
            trainer.task.forward,
            _placed(self._embeds[index], device),
            conditioning_BNK=self._no_conditioning(packed_1ND),
            position_ids_1N3=position_ids(1, frames, rows // patch_size, columns // patch_size, device=device),
            embedded_guidance=settings.train_mmdit.embedded_guidance if distilled else None,
        )
        timesteps = flow_timesteps(
            chosen.num_inference_steps,
            tokens_per_frame=rows * columns // patch_size**2,
            num_latent_frames=frames,
        )
        guidance = NO_GUIDANCE if distilled else Guidance(guidance_scale=chosen.guidance_scale)
        scales = guidance_scales(guidance, mode=T2V, timesteps=tuple(timesteps), num_latent_frames=frames)
        packed_1ND = denoise(velocity, packed_1ND, timesteps=timesteps, scales=scales)
        return unpack_latents(
            packed_1ND, num_latent_frames=frames, height=rows, width=columns, patch_size=patch_size
        ).to(_HOST)

    def _no_conditioning(self, packed_1ND: Tensor) -> Tensor | None:
        model = self._settings.model
        if not model.cond_embed:
            return None
        return packed_1ND.new_zeros(1, packed_1ND.shape[1], model.in_channels + model.patch_size**2)

    def _write_all(self, step: int, latents: list[Tensor], device: torch.device) -> list[Path]:
        written = []
        self._autoencoder.to(device)
        try:
            for index, latents_1CTHW in enumerate(latents):
                try:
                    written.append(self._write(step, index, self._frames(latents_1CTHW, device)))
                except OutputError as error:
                    self._reporter.warn(f"{error.message}: the video is left out")
        finally:
            self._autoencoder.to(_HOST)
            release_memory(device)
        return written

    def _write(self, step: int, index: int, frames: Iterator[Tensor]) -> Path:
        chosen = self._settings.samples
        return write_media(
            frames,
            self._folder / f"step{step}" / f"{index}.mp4",
            fps=chosen.rate(self._settings.data),
            format=MediaFormat.MP4,
            metadata={
                "prompt": chosen.prompts[index],
                "seed": str(chosen.seed + index),
                "step": str(step),
                "software": f"osora {opensora_cli.__version__}",
            },
        )

    @torch.no_grad()
    def _frames(self, latents_1CTHW: Tensor, device: torch.device) -> Iterator[Tensor]:
        dtype = next(self._autoencoder.parameters()).dtype
        pieces = self._autoencoder.decode_pieces(
            latents_1CTHW.to(device, dtype), tiling=vae_tiling(self._settings.vae), canvas=_HOST
        )
        for piece_1CTHW in pieces:
            yield to_uint8(piece_1CTHW[0])


def open_samples(
    settings: TrainSettings, *, distribution: Distribution, output: Path, reporter: Reporter
) -> SampleVideos | None:
    """Return what makes a run's sample videos; None: it has none.

    The prompts are encoded here, and the text encoders freed: call it before the model is loaded.
    Raises CheckpointError if frozen parts are missing or broken, and RequestError if a text length does not suit its
    encoder.
    """
    chosen, trained = settings.samples, settings.train_mmdit
    if settings.target is not TrainTarget.MMDIT or chosen.every is None:
        return None
    encoders = load_encoders(settings, device=distribution.device)
    empty = encoders.empty_prompt
    embeds = []
    for prompt in chosen.prompts:
        caption = training_caption(prompt, fps=chosen.rate(settings.data), motion_score=None, settings=trained)
        states_2LC = torch.stack([encoders.prompt_embeds(caption), empty.prompt_embeds_LC])
        pooled_2V = torch.stack([encoders.pooled_prompt_embeds(caption), empty.pooled_prompt_embeds_V])
        embeds.append(PromptEmbeds(states_2LC.to(_HOST), pooled_2V.to(_HOST)))
    autoencoder = encoders.autoencoder.to(_HOST)
    del encoders
    release_memory(distribution.device)
    return SampleVideos(
        settings, embeds=embeds, autoencoder=autoencoder, folder=output / SAMPLES_FOLDER, reporter=reporter
    )


def remove_later(folder: Path, *, step: int) -> None:
    """Remove the videos of later steps than `step` from a folder of samples, which need not be there.
    A link in it is removed, and what it points to stays. Raises OutputError if that is not possible.
    """
    for each in folder.glob("step*"):
        found = re.fullmatch(r"step(\d+)", each.name)
        if found and int(found[1]) > step:
            try:
                remove(each)
            except OSError as error:
                raise OutputError(f"cannot remove {each}: {error.strerror or error}") from error


def _placed(embeds: PromptEmbeds, device: torch.device) -> PromptEmbeds:
    return PromptEmbeds(embeds.prompt_embeds_2LC.to(device).float(), embeds.pooled_prompt_embeds_2V.to(device).float())
