"""From embeddings, references and noise to the latents of every sample."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import torch

from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.progress import StageProgress
from opensora_cli.core.signals import held_back
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.engine.estimate.generation import computes_modulation_first
from opensora_cli.engine.estimate.offload import DENOISE
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.loaded import LoadedModels, retried
from opensora_cli.engine.generate.outputs import sample_settings
from opensora_cli.engine.generate.previews import Previews
from opensora_cli.engine.generate.ranks import Ranks, agreed_tensors
from opensora_cli.engine.generate.saved_latents import open_latents, save_latents
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.engine.generate.targets import SampleFiles
from opensora_cli.engine.generate.work import Clip, DenoisedSample, Whole, unfinished
from opensora_cli.sampling.conditioning import prepare_inference_condition, restore_references
from opensora_cli.sampling.denoise import OnStep, Past, Step, denoise, euler_step
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import noise_latents
from opensora_cli.sampling.step_cache import Phase

OnPredicted = Callable[[int, Callable[[], torch.Tensor]], None]
"""Called after each step with how many are done, and what returns latents_BCTHW as they are predicted by then."""


def saved_samples(plan: ExecutionPlan, files: Sequence[SampleFiles], ranks: Ranks | None) -> dict[int, DenoisedSample]:
    """Return the samples whose latents are there to go on from, by their index; rank 0 reads them."""
    samples = {}
    for sample in files:
        if sample.saved is None:
            continue
        there: Sequence[torch.Tensor] = ()
        if ranks is None or ranks.is_main:
            file = open_latents(sample.saved)
            there = (*file.read_segments(), *file.read_past())
        if ranks is not None:
            there = agreed_tensors(there, device=ranks.device)
        if any(tuple(each.shape) != plan.latent_shape for each in there):
            raise RequestError(
                f"{sample.saved} holds latents of {tuple(there[-1].shape)}, and the settings ask for "
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
        done, begun = divmod(steps, len(plan.timesteps) - 1)
        past = plan.segments[done].past_times(begun) if is_begun else {}
        count = done + bool(begun)
        if is_begun is (sample.saved_steps is None) or len(there) != count + len(past):
            raise CheckpointError(
                f"{sample.saved} was saved after step {steps} of {plan.num_steps}"
                + (f", and has {len(there)} latents, with what they look back at" if len(there) > 1 else ""),
                hint="remove it, and start again",
            )
        *before, latents_CTHW = there[:count]
        samples[sample.index] = DenoisedSample(
            latents_CTHW, denoise_s=0.0, before=tuple(before), past=tuple(there[count:])
        )
    return samples


def denoise_clips(
    clips: Sequence[Clip],
    models: LoadedModels,
    record: RunRecord,
    *,
    previews: Previews | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Give every clip its latents, each saved as soon as it is finished, if that is wanted.

    As many are computed together as their plan says. Of a clip that is begun, `work.saved` has what has been through
    its `steps_done`. What ends early is saved as it is. `previews` are given what each step predicts; None: nobody
    looks. `ranks` share the work; files are rank 0's. None: there is only this one.

    Raises:
        CheckpointError: weights are broken or do not fit the settings.
        OutputError: latents cannot be written.
        HardwareError: out of memory.
    """
    if ranks is not None and clips[0].plan.start:
        rest = [clip for clip in clips if clip.sample.saved_steps is None]
        own = [clip.draft_CTHW for clip in rest if clip.draft_CTHW is not None] if ranks.is_main else None
        for clip, draft_CTHW in zip(rest, agreed_tensors(own, device=ranks.device), strict=True):
            clip.draft_CTHW = draft_CTHW

    def denoise_the_rest(plan: ExecutionPlan) -> None:
        missing = unfinished(clips)
        left = sum(plan.evaluations_after(clip.steps_done) for clip in missing)
        with (
            models.transformer(plan, record) as transformer,
            record.blocks_timed(transformer),
            record.stage(DENOISE, total=left, unit="evaluations") as progress,
        ):
            evaluate = transformer if ranks is None else ranks.share_tokens(transformer)
            for batch in _batches(missing, plan.offload.batch_size):
                _denoise_batch(plan, batch, evaluate, record, progress, previews, ranks)

    retried(denoise_the_rest, clips[0].plan, DENOISE, models, record)


def _batches(clips: Sequence[Clip], size: int) -> Iterator[list[Clip]]:
    """Yield the clips that are computed together: all have as many steps to go."""
    by_steps: dict[tuple[int, bool], list[Clip]] = {}
    for clip in clips:
        by_steps.setdefault((clip.steps_done, clip.is_begun), []).append(clip)
    for alike in by_steps.values():
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def _denoise_batch(
    plan: ExecutionPlan,
    clips: Sequence[Clip],
    transformer: Callable[..., torch.Tensor],
    record: RunRecord,
    progress: StageProgress,
    previews: Previews | None,
    ranks: Ranks | None,
) -> None:
    start = time.perf_counter()
    savers = [_Saver(clip.work.whole or Whole(clip.plan, ()), clip.sample, record, ranks) for clip in clips]
    steps_done = clips[0].steps_done
    embeds = [clip.work.embeds[0] for clip in clips]
    references = [clip.reference_latents for clip in clips if clip.reference_latents is not None]
    drafts = [clip.draft_CTHW for clip in clips if clip.draft_CTHW is not None]
    saved = [clip.work.saved[clip.sample.index] for clip in clips if clip.is_begun]

    def save_states(step: Step) -> None:
        past = [step.past[key].value_BND for key in plan.past_times(step.steps_done)]
        for index, saver in enumerate(savers):
            saver.step(step.steps_done, *(each[index : index + 1] for each in (step.packed_latents_BND, *past)))

    def show(steps: int, latents_BCTHW: Callable[[], torch.Tensor]) -> None:
        if previews is not None:
            predicted_BCTHW = cache(latents_BCTHW)
            for index, clip in enumerate(clips):
                previews.step(clip.sample, steps, partial(_clip_of, predicted_BCTHW, index))

    with ExitStack() as stack:
        for saver in savers:
            stack.enter_context(saver.kept())
        latents_BCTHW = sample_latents(
            plan,
            transformer,
            embeds,
            references or None,
            seeds=[clip.sample.noise_seed for clip in clips],
            begun=saved or None,
            drafts=drafts or None,
            steps_done=steps_done,
            ranks=ranks,
            on_evaluation=partial(progress.advance, len(clips)),
            on_step=save_states,
            on_predicted=show,
        ).cpu()
    seconds = (time.perf_counter() - start) / len(clips)
    for clip, latents_CTHW in zip(clips, latents_BCTHW, strict=True):
        clip.denoised = DenoisedSample(latents_CTHW, seconds)
    if plan.settings.sampling.stop_at is None:
        # All of them, also where Ctrl-C is pressed after the first.
        with held_back():
            for clip, saver, latents_CTHW in zip(clips, savers, latents_BCTHW, strict=True):
                with clip.work.trying():
                    saver.save(latents_CTHW)


def _clip_of(latents_BCTHW: Callable[[], torch.Tensor], index: int) -> torch.Tensor:
    return latents_BCTHW()[index]


class _Saver:
    """Saves the latents of a sample: those of the end, or of a step from which they go on."""

    def __init__(self, whole: Whole, sample: SampleFiles, record: RunRecord, ranks: Ranks | None) -> None:
        self._plan, self._before, self._sample, self._record = whole.plan, whole.before, sample, record
        self._path = sample.latents if ranks is None or ranks.is_main else None
        self._has_others = ranks is not None
        self._last: tuple[int, Sequence[torch.Tensor]] | None = None

    def step(self, steps: int, *packed_1ND: torch.Tensor) -> None:
        """Remember the latents after so many steps, with what the solver looks back at; save them if asked for."""
        if self._path is None:
            return
        # A GPU that waits for a rank which has ended would never come to copying them.
        self._last = steps, [each.cpu() if self._has_others else each for each in packed_1ND]
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

    def save(self, latents_CTHW: torch.Tensor, *, steps: int | None = None, past: Sequence[torch.Tensor] = ()) -> None:
        """Save latents after so many steps of their segment, None: all; `past` as in `DenoisedSample`."""
        if self._path is None:
            return
        of_segment = len(self._plan.timesteps) - 1
        done = len(self._before) * of_segment + (of_segment if steps is None else steps)
        steps = None if steps is None and done == self._plan.num_steps else done
        settings = sample_settings(self._plan, self._sample).replace(
            {"sampling.stop_at": None, "output.explore": False}
        )
        request = self._sample.request_sha256
        with self._record.keeping(self._path, self._sample, is_begun=steps is not None):
            save_latents(
                self._path,
                latents_CTHW,
                settings,
                request_sha256=request,
                steps=steps,
                before=self._before,
                past=past,
                attention=None if self._plan.attention is None else self._plan.attention.backend,
            )

    def _save_last(self) -> None:
        if self._last is None:
            return
        steps, packed = self._last
        if steps < len(self._plan.timesteps) - 1:
            latents_CTHW, *past = (_unpacked(self._plan, each_1ND)[0] for each_1ND in packed)
            self.save(latents_CTHW, steps=steps, past=past)


def sample_latents(
    plan: ExecutionPlan,
    transformer: Callable[..., torch.Tensor],
    embeds: Sequence[PromptEmbeds],
    reference_latents: Sequence[Sequence[torch.Tensor]] | None,
    *,
    seeds: Sequence[int],
    begun: Sequence[DenoisedSample] | None = None,
    drafts: Sequence[torch.Tensor] | None = None,
    steps_done: int = 0,
    ranks: Ranks | None = None,
    on_evaluation: Callable[[], None] = lambda: None,
    on_step: OnStep = lambda step: None,
    on_predicted: OnPredicted = lambda steps, latents_BCTHW: None,
) -> torch.Tensor:
    """Return latents_BCTHW of samples, computed as one batch, given frames put back; where `sampling.stop_at` ends it,
    those predicted.

    A sample of a batch is the one that is made alone but for rounding.

    Args:
        plan: of each of them, but for what is given here.
        transformer: on the plan's device, and called like `MMDiT`.
        embeds: of the prompts of each sample.
        reference_latents: for each sample the latents_CTHW of each reference; None where nothing is given.
        seeds: of the noise of each sample.
        begun: for each sample what `steps_done` have made of its noise; None: none are done, or they are left out.
        drafts: where they are left out, of each sample the latents_CTHW with which its noise is mixed to
            (1-t)·data + t·noise at the time t of the next step (Liu et al., arXiv 2209.03003; to start from a guide:
            Meng et al., "SDEdit", arXiv 2108.01073).
        ranks: that share the work, all of which get the latents; None: there is only this one.
        on_evaluation: called after each evaluation of the transformer.
        on_step: called after each step; so is `on_predicted`.
    """
    device, settings = plan.hardware.device, plan.settings
    channels, num_latent_frames, rows, columns = plan.latent_shape
    patch_size = settings.model.patch_size
    noise_BCTHW = noise_latents(
        seeds,
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
        [noise_BCTHW] = agreed_tensors([noise_BCTHW], device=device)
    mask_B1THW, given_BCTHW = prepare_inference_condition(
        noise_BCTHW,
        plan.mode,
        reference_latents,
        settings.vae.grid.is_causal,
        lengths=plan.lengths,
    )
    velocity = GuidedVelocity(
        transformer,
        embeds,
        conditioning_BNK=pack_conditioning(mask_B1THW, given_BCTHW, patch_size) if settings.model.cond_embed else None,
        position_ids_1N3=position_ids(1, num_latent_frames, rows // patch_size, columns // patch_size, device=device),
        embedded_guidance=settings.sampling.embedded_guidance if settings.model.guidance_embed else None,
        times=plan.timesteps if computes_modulation_first(settings) else (),
        on_evaluation=on_evaluation,
    )
    latents_BCTHW, past = noise_BCTHW, dict[Branch | Phase, Past]()
    if begun is not None:
        latents_BCTHW = torch.stack([each.latents_CTHW for each in begun]).to(noise_BCTHW)
        times = plan.past_times(steps_done)
        for (key, t), *values in zip(times.items(), *(each.past for each in begun), strict=True):
            past[key] = Past(t, pack_latents(torch.stack(values).to(noise_BCTHW), patch_size))
    elif drafts is not None:
        latents_BCTHW = torch.stack(list(drafts)).to(noise_BCTHW).lerp(noise_BCTHW, plan.timesteps[steps_done])
    packed_BND = pack_latents(latents_BCTHW, patch_size)
    stop = settings.sampling.stop_at
    predicted: list[torch.Tensor] = []

    def finished(packed_BND: torch.Tensor) -> torch.Tensor:
        latents_BCTHW = _unpacked(plan, packed_BND)
        if plan.mode.gives_pictures:
            latents_BCTHW = restore_references(latents_BCTHW, mask_B1THW, given_BCTHW)
        return latents_BCTHW

    def stepped(step: Step) -> None:
        on_step(step)

        def prediction() -> torch.Tensor:
            t = plan.timesteps[step.steps_done]
            return finished(euler_step(step.packed_latents_BND, step.velocity_BND, t=t, t_next=0.0))

        on_predicted(step.steps_done, prediction)
        if step.steps_done == stop:
            predicted.append(prediction())

    packed_BND = denoise(
        velocity if ranks is None else ranks.share_branches(velocity, on_evaluation=on_evaluation),
        packed_BND,
        timesteps=plan.timesteps,
        scales=plan.scales,
        solver=settings.sampling.solver,
        cache=plan.cache,
        steps_done=steps_done,
        past=past,
        stop_at=stop,
        on_step=stepped,
    )
    return predicted[0] if predicted else finished(packed_BND)


def _unpacked(plan: ExecutionPlan, packed_BND: torch.Tensor) -> torch.Tensor:
    _, frames, rows, columns = plan.latent_shape
    patch_size = plan.settings.model.patch_size
    return unpack_latents(packed_BND, num_latent_frames=frames, height=rows, width=columns, patch_size=patch_size)
