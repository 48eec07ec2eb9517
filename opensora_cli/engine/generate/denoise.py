"""From embeddings, references and noise to the latents of every sample."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.progress import StageProgress
from opensora_cli.core.signals import held_back
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.engine.estimate.generation import computes_modulation_first
from opensora_cli.engine.estimate.offload import DENOISE
from opensora_cli.engine.generate.events import RunRecord
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.outputs import sample_settings
from opensora_cli.engine.generate.plan import Chain, Plan
from opensora_cli.engine.generate.previews import Previews
from opensora_cli.engine.generate.ranks import Ranks, broadcast_tensors
from opensora_cli.engine.generate.sample import DenoisedSample, Sample, unfinished
from opensora_cli.engine.generate.saved_latents import open_latents, save_latents
from opensora_cli.engine.generate.targets import SampleFiles
from opensora_cli.sampling.conditioning import prepare_inference_condition, restore_references
from opensora_cli.sampling.denoise import OnStep, Past, Step, denoise, euler_step
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import noise_latents
from opensora_cli.sampling.step_cache import Phase

OnPredicted = Callable[[int, Callable[[], torch.Tensor]], None]
"""Called after each step with the number of steps done and a function that returns the predicted latents_CTHW."""


def saved_samples(chain: Chain, files: Sequence[SampleFiles], ranks: Ranks | None) -> dict[int, DenoisedSample]:
    """Return the saved latents of samples, by index; rank 0 reads the files."""
    plan = chain.video
    samples = {}
    for sample in files:
        if sample.saved is None:
            continue
        there: Sequence[torch.Tensor] = ()
        if ranks is None or ranks.is_main:
            file = open_latents(sample.saved)
            there = (*file.read_segments(), *file.read_past())
        if ranks is not None:
            there = broadcast_tensors(there, device=ranks.device)
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
        steps = chain.num_steps if sample.saved_steps is None else sample.saved_steps
        is_begun = 0 < steps < chain.num_steps
        done, begun = divmod(steps, plan.num_steps)
        past = chain.segments[done].past_times(begun) if is_begun else {}
        count = done + bool(begun)
        if is_begun is (sample.saved_steps is None) or len(there) != count + len(past):
            raise CheckpointError(
                f"{sample.saved} was saved after step {steps} of {chain.num_steps}"
                + (f", and has {len(there)} latents, with what they look back at" if len(there) > 1 else ""),
                hint="remove it, and start again",
            )
        *before, latents_CTHW = there[:count]
        samples[sample.index] = DenoisedSample(
            latents_CTHW, denoise_s=0.0, before=tuple(before), past=tuple(there[count:])
        )
    return samples


def denoise_samples(
    samples: Sequence[Sample],
    embeds: PromptEmbeds,
    models: LoadedModels,
    record: RunRecord,
    *,
    previews: Previews | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Denoise every sample of one plan that has no complete latents.

    Latents are saved when they are complete, if the plan wants that, and in the state of the last step when the run
    ends early. `previews` show the prediction of each step. `ranks` share the work; rank 0 owns the files.

    Raises:
        CheckpointError: weights are broken or do not fit the settings.
        OutputError: latents cannot be written.
        HardwareError: out of memory.
    """
    if ranks is not None and samples[0].plan.start:
        fresh = [sample for sample in samples if not sample.is_begun]
        own = [sample.draft_CTHW for sample in fresh if sample.draft_CTHW is not None] if ranks.is_main else None
        for sample, draft_CTHW in zip(fresh, broadcast_tensors(own, device=ranks.device), strict=True):
            sample.draft_CTHW = draft_CTHW

    def denoise_the_rest(plan: Plan) -> None:
        missing = unfinished(samples)
        left = sum(plan.evaluations_after(sample.steps_done) for sample in missing)
        with (
            models.transformer(plan, record) as transformer,
            record.stage(DENOISE, total=left, unit="evaluations") as progress,
        ):
            evaluate = transformer if ranks is None else ranks.share_tokens(transformer)
            for sample in missing:
                _denoise_sample(plan, sample, embeds, evaluate, record, progress, previews, ranks)

    retried(denoise_the_rest, samples[0].plan, DENOISE, models, record)


def _denoise_sample(
    plan: Plan,
    sample: Sample,
    embeds: PromptEmbeds,
    transformer: Callable[..., torch.Tensor],
    record: RunRecord,
    progress: StageProgress,
    previews: Previews | None,
    ranks: Ranks | None,
) -> None:
    start = time.perf_counter()
    saver = _Saver(sample, record, ranks)

    def save_state(step: Step) -> None:
        past = [step.past[key].value_BND for key in plan.past_times(step.steps_done)]
        saver.step(step.steps_done, step.packed_latents_BND, *past)
        record.stop_if_cancelled()

    def show(steps: int, predicted_CTHW: Callable[[], torch.Tensor]) -> None:
        if previews is not None:
            previews.step(sample.files, steps, predicted_CTHW)

    with saver.kept():
        latents_CTHW = sample_latents(
            plan,
            transformer,
            embeds,
            sample.reference_latents,
            seed=sample.files.noise_seed,
            begun=sample.saved if sample.is_begun else None,
            draft_CTHW=sample.draft_CTHW,
            steps_done=sample.steps_done,
            ranks=ranks,
            on_evaluation=progress.advance,
            on_step=save_state,
            on_predicted=show,
        ).cpu()
    sample.denoised = DenoisedSample(latents_CTHW, time.perf_counter() - start)
    if plan.settings.sampling.stop_at is None:
        with held_back():
            saver.save(latents_CTHW)


class _Saver:
    """Saves the latents of a sample: those of the end, or of a step from which they go on."""

    def __init__(self, sample: Sample, record: RunRecord, ranks: Ranks | None) -> None:
        self._chain, self._plan, self._before, self._sample = sample.chain, sample.plan, sample.before, sample.files
        self._record = record
        self._path = sample.files.latents if ranks is None or ranks.is_main else None
        self._has_others = ranks is not None
        self._last: tuple[int, Sequence[torch.Tensor]] | None = None

    def step(self, steps: int, *packed_1ND: torch.Tensor) -> None:
        """Remember the latents after so many steps, with what the solver looks back at; save them if asked for."""
        if self._path is None:
            return
        # A GPU that waits for a rank which has ended would never come to copying them.
        self._last = steps, [each.cpu() if self._has_others else each for each in packed_1ND]
        settings = self._chain.settings
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
        of_segment = self._plan.num_steps
        done = len(self._before) * of_segment + (of_segment if steps is None else steps)
        steps = None if steps is None and done == self._chain.num_steps else done
        settings = sample_settings(self._chain.video, self._sample).replace(
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
        if steps < self._plan.num_steps:
            latents_CTHW, *past = (_unpacked(self._plan, each_1ND)[0] for each_1ND in packed)
            self.save(latents_CTHW, steps=steps, past=past)


def sample_latents(
    plan: Plan,
    transformer: Callable[..., torch.Tensor],
    embeds: PromptEmbeds,
    reference_latents: Sequence[torch.Tensor] | None,
    *,
    seed: int,
    begun: DenoisedSample | None = None,
    draft_CTHW: torch.Tensor | None = None,
    steps_done: int = 0,
    ranks: Ranks | None = None,
    on_evaluation: Callable[[], None] = lambda: None,
    on_step: OnStep = lambda step: None,
    on_predicted: OnPredicted = lambda steps, latents_CTHW: None,
) -> torch.Tensor:
    """Return latents_CTHW of one sample, with given frames restored; the prediction where `sampling.stop_at` ends it.

    Args:
        plan: sizes, schedule and guidance.
        transformer: on the plan's device, called like `MMDiT`.
        embeds: prompt and negative prompt.
        reference_latents: latents_CTHW of each reference; None without references.
        seed: seed of the noise.
        begun: state after `steps_done`; None for a sample that starts from noise or from a draft.
        draft_CTHW: latents of the draft. The noise is mixed with them to (1-t)·data + t·noise at the time t of the
            next step (Liu et al., arXiv 2209.03003; Meng et al., "SDEdit", arXiv 2108.01073).
        ranks: processes that share the work, all of which get the latents; None for a single process.
        on_evaluation: called after each evaluation of the transformer.
        on_step: called after each step; so is `on_predicted`.
    """
    device, settings = plan.hardware.device, plan.settings
    channels, num_latent_frames, rows, columns = plan.latent_shape
    patch_size = settings.model.patch_size
    noise_BCTHW = noise_latents(
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
        [noise_BCTHW] = broadcast_tensors([noise_BCTHW], device=device)
    mask_B1THW, given_BCTHW = prepare_inference_condition(
        noise_BCTHW,
        plan.mode,
        None if reference_latents is None else [reference_latents],
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
        latents_BCTHW = begun.latents_CTHW[None].to(noise_BCTHW)
        for (key, t), value_CTHW in zip(plan.past_times(steps_done).items(), begun.past, strict=True):
            past[key] = Past(t, pack_latents(value_CTHW[None].to(noise_BCTHW), patch_size))
    elif draft_CTHW is not None:
        latents_BCTHW = draft_CTHW[None].to(noise_BCTHW).lerp(noise_BCTHW, plan.timesteps[steps_done])
    packed_BND = pack_latents(latents_BCTHW, patch_size)
    stop = settings.sampling.stop_at
    predicted: list[torch.Tensor] = []

    def finished(packed_BND: torch.Tensor) -> torch.Tensor:
        latents_BCTHW = _unpacked(plan, packed_BND)
        if plan.mode.gives_pictures:
            latents_BCTHW = restore_references(latents_BCTHW, mask_B1THW, given_BCTHW)
        return latents_BCTHW[0]

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


def _unpacked(plan: Plan, packed_BND: torch.Tensor) -> torch.Tensor:
    _, frames, rows, columns = plan.latent_shape
    patch_size = plan.settings.model.patch_size
    return unpack_latents(packed_BND, num_latent_frames=frames, height=rows, width=columns, patch_size=patch_size)
