"""From embeddings, references and noise to the latents of every sample."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch

from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.signals import held_back
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.engine.estimate.offload import DENOISE
from opensora_cli.engine.generate.loaded import LoadedModels, retried
from opensora_cli.engine.generate.outputs import sample_settings
from opensora_cli.engine.generate.plan import ExecutionPlan
from opensora_cli.engine.generate.previews import Previews
from opensora_cli.engine.generate.ranks import Ranks, agreed_tensors
from opensora_cli.engine.generate.saved_latents import open_latents, save_latents
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import SampleFiles
from opensora_cli.sampling.conditioning import prepare_inference_condition, restore_references
from opensora_cli.sampling.denoise import OnStep, denoise, denoise_distilled, euler_step
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import noise_latents

OnPredicted = Callable[[int, Callable[[], torch.Tensor]], None]
"""Called after each step with how many are done, and what returns latents_1CTHW as they are predicted by then."""

_NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DenoisedSample:
    """The latents of one sample, and what sampling them took."""

    latents_CTHW: torch.Tensor
    """On the CPU."""
    denoise_s: float
    """Seconds; 0 where they come from a file."""
    before: tuple[torch.Tensor, ...] = ()
    """The latents of the segments before, which are complete, of a video that is extended."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The extended video that a segment is made for."""

    plan: ExecutionPlan
    before: tuple[torch.Tensor, ...]
    """The latents of the segments that are complete."""


def saved_samples(plan: ExecutionPlan, files: Sequence[SampleFiles], ranks: Ranks | None) -> dict[int, DenoisedSample]:
    """Return the samples whose latents are there to go on from, by their index; rank 0 reads them."""
    samples = {}
    for sample in files:
        if sample.saved is None:
            continue
        segments: Sequence[torch.Tensor] = ()
        if ranks is None or ranks.is_main:
            segments = open_latents(sample.saved).read_segments()
        if ranks is not None:
            segments = agreed_tensors(segments, device=ranks.device)
        *before, latents_CTHW = segments
        if any(tuple(each.shape) != plan.latent_shape for each in segments):
            raise RequestError(
                f"{sample.saved} holds latents of {tuple(latents_CTHW.shape)}, and the settings ask for "
                f"{plan.latent_shape}",
                hint="change neither size, length nor model when going on from latents",
            )
        stop, steps = plan.settings.sampling.stop_at, sample.saved_steps
        keeps = plan.decodes_only or plan.settings.output.explore
        if stop is not None and not keeps and (steps is None or steps >= stop):
            after = "all steps" if steps is None else f"step {steps}"
            raise RequestError(
                f"sampling.stop_at={stop} is over: {sample.saved} was saved after {after}",
                hint="go on without --stop-at, or stop later",
            )
        steps = plan.num_steps if sample.saved_steps is None else sample.saved_steps
        is_begun = 0 < steps < plan.num_steps
        if is_begun is (sample.saved_steps is None) or len(segments) != math.ceil(steps / (len(plan.timesteps) - 1)):
            raise CheckpointError(
                f"{sample.saved} was saved after step {steps} of {plan.num_steps}"
                + (f", and has {len(segments)} segments" if len(segments) > 1 else ""),
                hint="remove it, and start again",
            )
        samples[sample.index] = DenoisedSample(latents_CTHW, denoise_s=0.0, before=tuple(before))
    return samples


def denoise_samples(
    plan: ExecutionPlan,
    files: Sequence[SampleFiles],
    embeds: PromptEmbeds,
    reference_latents: Sequence[torch.Tensor] | None,
    models: LoadedModels,
    record: RunRecord,
    *,
    begun: Mapping[int, torch.Tensor] = _NOTHING,
    drafts: Mapping[int, torch.Tensor] = _NOTHING,
    previews: Previews | None = None,
    ranks: Ranks | None = None,
    whole: Whole | None = None,
) -> list[DenoisedSample]:
    """Return the latents of every sample, each saved as soon as it is finished, if that is wanted.

    Of a sample in `begun`, by its index, the latents_CTHW have been through its `saved_steps`. What ends early is saved
    as it is. `drafts` has the latents_CTHW of the others from which they start, where `plan.start` is not 0. `previews`
    are given what each step predicts; None: nobody looks. `ranks` share the work; references, drafts and files are rank
    0's. None: there is only this one. `whole` is the video of which `plan` is a segment; None: it is all of it.

    Raises:
        CheckpointError: weights are broken or do not fit the settings.
        OutputError: latents cannot be written.
        HardwareError: out of memory.
    """
    if ranks is not None and plan.mode.needs_reference:
        reference_latents = agreed_tensors(reference_latents, device=ranks.device)
    if ranks is not None and plan.start:
        rest = [sample.index for sample in files if sample.index not in begun]
        agreed = agreed_tensors([drafts[index] for index in rest] if ranks.is_main else None, device=ranks.device)
        drafts = dict(zip(rest, agreed, strict=True))
    samples: list[DenoisedSample] = []

    def denoise_the_rest(plan: ExecutionPlan) -> None:
        missing = files[len(samples) :]
        left = sum(plan.evaluations_after(sample.saved_steps or plan.start) for sample in missing)
        with (
            models.transformer(plan, record) as transformer,
            record.blocks_timed(transformer),
            record.stage(DENOISE, total=left, unit="evaluations") as progress,
        ):
            evaluate = transformer if ranks is None else ranks.share_tokens(transformer)
            for sample in missing:
                start = time.perf_counter()
                saver = _Saver(whole or Whole(plan, ()), sample, record, ranks)

                def predicted(
                    steps: int, latents_1CTHW: Callable[[], torch.Tensor], sample: SampleFiles = sample
                ) -> None:
                    if previews is not None:
                        previews.step(sample, steps, lambda: latents_1CTHW()[0])

                with saver.kept():
                    latents_1CTHW = sample_latents(
                        plan,
                        evaluate,
                        embeds,
                        reference_latents,
                        seed=sample.noise_seed,
                        begun_CTHW=begun.get(sample.index),
                        draft_CTHW=drafts.get(sample.index),
                        steps_done=sample.saved_steps or plan.start,
                        ranks=ranks,
                        on_evaluation=progress.advance,
                        on_step=saver.step,
                        on_predicted=predicted,
                    )
                latents_CTHW = latents_1CTHW[0].cpu()
                samples.append(DenoisedSample(latents_CTHW, time.perf_counter() - start))
                if plan.settings.sampling.stop_at is None:
                    saver.save(latents_CTHW)

    retried(denoise_the_rest, plan, DENOISE, models, record)
    return samples


class _Saver:
    """Saves the latents of a sample: those of the end, or of a step from which they go on."""

    def __init__(self, whole: Whole, sample: SampleFiles, record: RunRecord, ranks: Ranks | None) -> None:
        self._plan, self._before, self._sample, self._record = whole.plan, whole.before, sample, record
        self._path = sample.latents if ranks is None or ranks.is_main else None
        self._has_others = ranks is not None
        self._last: tuple[int, torch.Tensor] | None = None

    def step(self, steps: int, packed_1ND: torch.Tensor, velocity_1ND: torch.Tensor) -> None:
        """Remember the latents after so many steps, and save them if they are asked for."""
        if self._path is None:
            return
        # A GPU that waits for a rank which has ended would never come to copying them.
        self._last = steps, packed_1ND.cpu() if self._has_others else packed_1ND
        settings = self._plan.settings
        every = settings.output.save_state_every
        if steps == settings.sampling.stop_at or (every is not None and not steps % every):
            self._save_last()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Save what the last step gave where the block ends early, also where that is an error of another rank."""
        try:
            yield
        except BaseException:
            with held_back():
                try:
                    self._save_last()
                except (OutputError, RuntimeError) as error:
                    self._record.reporter.warn(f"the latents of the last step cannot be saved: {error}")
            raise

    def save(self, latents_CTHW: torch.Tensor, *, steps: int | None = None) -> None:
        """Save latents after so many steps of their segment, None: all."""
        if self._path is None:
            return
        of_segment = len(self._plan.timesteps) - 1
        done = len(self._before) * of_segment + (of_segment if steps is None else steps)
        steps = None if steps is None and done == self._plan.num_steps else done
        settings = sample_settings(self._plan, self._sample).replace(
            {"sampling.stop_at": None, "output.explore": False}
        )
        request = self._sample.request_sha256
        with self._record.keeping(self._path, is_begun=steps is not None):
            save_latents(self._path, latents_CTHW, settings, request_sha256=request, steps=steps, before=self._before)

    def _save_last(self) -> None:
        if self._last is None:
            return
        steps, packed_1ND = self._last
        if steps < len(self._plan.timesteps) - 1:
            self.save(_unpacked(self._plan, packed_1ND)[0], steps=steps)


def sample_latents(
    plan: ExecutionPlan,
    transformer: Callable[..., torch.Tensor],
    embeds: PromptEmbeds,
    reference_latents: Sequence[torch.Tensor] | None,
    *,
    seed: int,
    begun_CTHW: torch.Tensor | None = None,
    draft_CTHW: torch.Tensor | None = None,
    steps_done: int = 0,
    ranks: Ranks | None = None,
    on_evaluation: Callable[[], None] = lambda: None,
    on_step: OnStep = lambda steps, packed_1ND, velocity_1ND: None,
    on_predicted: OnPredicted = lambda steps, latents_1CTHW: None,
) -> torch.Tensor:
    """Return latents_1CTHW of one sample, given frames put back; where `sampling.stop_at` ends it, those predicted.

    `transformer` is on the plan's device and called like `MMDiT`. `reference_latents` has the latents_CTHW of each
    reference. `begun_CTHW` are what `steps_done` have made of the noise; None: none are done, or they are left out, and
    the noise is mixed with `draft_CTHW` to (1-t)·data + t·noise at the time t of the next step (Liu et al., arXiv
    2209.03003; to start from a guide: Meng et al., "SDEdit", arXiv 2108.01073). All `ranks` that share the sample get
    the latents; None: there is only this one. `on_evaluation` is called after each evaluation of the transformer,
    `on_step` and `on_predicted` after each step.
    """
    device, settings = plan.hardware.device, plan.settings
    channels, num_latent_frames, rows, columns = plan.latent_shape
    patch_size = settings.model.patch_size
    noise_1CTHW = noise_latents(
        [seed],
        num_latent_frames=num_latent_frames,
        height=plan.height,
        width=plan.width,
        device=device,
        dtype=plan.hardware.dtype,
        latent_channels=channels,
        spatial_compression=settings.vae.grid.spatial_compression_ratio,
        patch_size=patch_size,
    )
    if ranks is not None:
        # The same numbers for the same seed are promised of one kind of device only.
        [noise_1CTHW] = agreed_tensors([noise_1CTHW], device=device)
    mask_11THW, given_1CTHW = prepare_inference_condition(
        noise_1CTHW,
        plan.mode,
        None if reference_latents is None else [reference_latents],
        settings.vae.grid.is_causal,
        lengths=plan.lengths,
    )
    distilled = settings.model.guidance_embed
    velocity = GuidedVelocity(
        transformer,
        embeds,
        conditioning_1NK=pack_conditioning(mask_11THW, given_1CTHW, patch_size) if settings.model.cond_embed else None,
        position_ids_1N3=position_ids(1, num_latent_frames, rows // patch_size, columns // patch_size, device=device),
        embedded_guidance=settings.sampling.embedded_guidance if distilled else None,
        on_evaluation=on_evaluation,
    )
    latents_1CTHW = noise_1CTHW if begun_CTHW is None else begun_CTHW[None].to(noise_1CTHW)
    if begun_CTHW is None and draft_CTHW is not None:
        latents_1CTHW = draft_CTHW[None].to(noise_1CTHW).lerp(noise_1CTHW, plan.timesteps[steps_done])
    packed_1ND = pack_latents(latents_1CTHW, patch_size)
    stop = settings.sampling.stop_at
    predicted: list[torch.Tensor] = []

    def finished(packed_1ND: torch.Tensor) -> torch.Tensor:
        latents_1CTHW = _unpacked(plan, packed_1ND)
        if plan.mode.gives_pictures:
            latents_1CTHW = restore_references(latents_1CTHW, mask_11THW, given_1CTHW)
        return latents_1CTHW

    def stepped(steps: int, packed_1ND: torch.Tensor, velocity_1ND: torch.Tensor) -> None:
        on_step(steps, packed_1ND, velocity_1ND)

        def prediction() -> torch.Tensor:
            return finished(euler_step(packed_1ND, velocity_1ND, t=plan.timesteps[steps], t_next=0.0))

        on_predicted(steps, prediction)
        if steps == stop:
            predicted.append(prediction())

    if distilled:
        packed_1ND = denoise_distilled(
            velocity.distilled,
            packed_1ND,
            timesteps=plan.timesteps,
            steps_done=steps_done,
            stop_at=stop,
            on_step=stepped,
        )
    else:
        packed_1ND = denoise(
            velocity if ranks is None else ranks.share_branches(velocity, on_evaluation=on_evaluation),
            packed_1ND,
            timesteps=plan.timesteps,
            guidance=plan.guidance,
            mode=plan.mode,
            num_latent_frames=num_latent_frames,
            steps_done=steps_done,
            stop_at=stop,
            on_step=stepped,
        )
    return predicted[0] if predicted else finished(packed_1ND)


def _unpacked(plan: ExecutionPlan, packed_1ND: torch.Tensor) -> torch.Tensor:
    _, frames, rows, columns = plan.latent_shape
    patch_size = plan.settings.model.patch_size
    return unpack_latents(packed_1ND, num_latent_frames=frames, height=rows, width=columns, patch_size=patch_size)
