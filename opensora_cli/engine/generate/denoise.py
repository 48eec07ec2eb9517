"""Denoising: compute the latents of every sample from embeddings, references and noise."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.signals import held_back
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.engine.estimate.generation import computes_modulation_first
from opensora_cli.engine.estimate.offload import DENOISE
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.previews import Previews, preview_map
from opensora_cli.engine.generate.ranks import ALONE, Ranks
from opensora_cli.engine.generate.references import reference_latents
from opensora_cli.engine.generate.sample import DenoisedSample, Sample, save_latents, unfinished
from opensora_cli.engine.generate.sidecar import sample_settings
from opensora_cli.sampling.conditioning import prepare_inference_condition, restore_references
from opensora_cli.sampling.denoise import OnStep, Past, Step, denoise, euler_step
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.schedule import noise_latents
from opensora_cli.sampling.step_cache import Phase

OnPredicted = Callable[[int, Callable[[], torch.Tensor]], None]
"""Called after each step with the number of steps done and a function that returns the predicted latents_CTHW."""


def denoise_samples(
    samples: Sequence[Sample], embeds: Sequence[PromptEmbeds], models: LoadedModels, events: Events
) -> None:
    """Denoise every sample of one job that has no complete latents.

    Complete latents are saved if the plan asks for that. If the run ends early, the state of the last step is saved.
    `embeds` has the embeddings of the prompt, and may be empty if all samples have complete latents. Of several
    ranks, which share the work, rank 0 owns the files.
    """
    missing = unfinished(samples)
    if not missing:
        return
    plan = missing[0].plan
    ranks = models.ranks.of(plan)
    encode_shared_references(missing, models, events)
    previews, output = None, plan.settings.output
    if ranks.is_main and (output.explore or output.preview_every is not None):
        previews = Previews(plan, preview_map(plan, models, events), events)

    def attempt(plan: Plan) -> None:
        left = unfinished(samples)
        evaluations = sum(plan.evaluations_after(sample.steps_done) for sample in left)
        with (
            models.transformer(plan, events) as transformer,
            events.stage(DENOISE, total=evaluations, unit="evaluations") as progress,
        ):
            evaluate = ranks.share_tokens(transformer)
            for sample in left:
                with ExitStack() as finishing:
                    start, saver = time.perf_counter(), _Saver(sample, plan, events, ranks, finishing)
                    with saver.saving_last_step():
                        latents_CTHW = sample_latents(
                            plan,
                            evaluate,
                            embeds[0],
                            sample.reference_latents,
                            seed=sample.files.noise_seed,
                            begun=sample.begun,
                            draft_CTHW=sample.draft_CTHW,
                            steps_done=sample.steps_done,
                            ranks=ranks,
                            on_evaluation=progress.advance,
                            on_step=saver.step,
                            on_predicted=None if previews is None else partial(previews.step, sample.files),
                        ).cpu()
                    sample.denoised = DenoisedSample(latents_CTHW, time.perf_counter() - start)
                    if plan.settings.sampling.stop_at is None:
                        saver.save(latents_CTHW)
                if output.explore and sample.files.latents is not None:
                    events.note_saved(sample.files.latents)
                events.check_cancelled()

    retried(attempt, plan, DENOISE, models, events)


def encode_shared_references(samples: Sequence[Sample], models: LoadedModels, events: Events) -> None:
    """Encode the references of samples that lack their latents, on rank 0. Shared references are encoded once."""
    encoded: dict[int, Sequence[torch.Tensor] | None] = {}
    for sample in (each for each in samples if each.reference_latents is None):
        key = id(sample.references)
        if key not in encoded:
            encoded[key] = reference_latents(sample.plan, sample.references, models, events)
            if models.ranks.count > 1 and sample.plan.mode.needs_reference:
                encoded[key] = models.ranks.same_tensors(encoded[key])
        sample.reference_latents = encoded[key]


class _Saver:
    """Saver of the latents of a sample, complete or after a step from which a later run continues."""

    def __init__(self, sample: Sample, plan: Plan, events: Events, ranks: Ranks, finishing: ExitStack) -> None:
        self._sample, self._plan, self._events = sample, plan, events
        self._finishing = finishing
        """Context in which Ctrl-C waits, from the last step until the complete latents are saved."""
        self._path = sample.files.latents if ranks.is_main else None
        self._last: tuple[int, Sequence[torch.Tensor]] | None = None

    def step(self, step: Step) -> None:
        """Remember the state after a step, and save the state if it is due; then end the run if it is cancelled."""
        if is_last := step.steps_done == self._plan.num_steps:
            self._finishing.enter_context(held_back())
        if self._path is not None:
            past = [step.past[key].value_BND for key in self._plan.past_times(step.steps_done)]
            # A GPU that waits in a collective for a rank that has ended could not copy the state later.
            self._last = step.steps_done, [each.cpu() for each in (step.packed_latents_BND, *past)]
            settings = self._sample.chain.settings
            every = settings.output.save_state_every
            is_due = every is not None and not step.steps_done % every
            if is_due or step.steps_done == settings.sampling.stop_at or self._events.hooks.wants_state():
                self._save_last()
        if not is_last:
            self._events.check_cancelled()

    @contextmanager
    def saving_last_step(self) -> Iterator[None]:
        """Save the state of the last step if the block ends early."""
        try:
            yield
        except BaseException:
            with held_back():
                try:
                    self._save_last()
                except (OutputError, RuntimeError) as error:
                    self._events.reporter.warn(f"the latents of the last step cannot be saved: {error}")
            raise

    def save(self, latents_CTHW: torch.Tensor, *, steps: int | None = None, past: Sequence[torch.Tensor] = ()) -> None:
        """Save latents after `steps` of their job, None for all; `past` is the field of `DenoisedSample`."""
        if self._path is None:
            return
        sample, files, of_job = self._sample, self._sample.files, self._plan.num_steps
        settings = sample_settings(sample.chain.video, files)
        done: int | None = files.segment * of_job + (of_job if steps is None else steps)
        if steps is None and done == sample.chain.num_steps:
            done = None
        save_latents(
            self._path,
            latents_CTHW,
            settings.replace({"sampling.stop_at": None, "output.explore": False}),
            request_sha256=files.request_sha256,
            steps=done,
            finished=sample.earlier,
            past=past,
            attention=None if sample.plan.attention is None else sample.plan.attention.backend,
        )
        self._events.report_left()

    def _save_last(self) -> None:
        if self._last is None or self._last[0] >= self._plan.num_steps:
            return
        steps, packed = self._last
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
    ranks: Ranks = ALONE,
    on_evaluation: Callable[[], None] = lambda: None,
    on_step: OnStep = lambda step: None,
    on_predicted: OnPredicted | None = None,
) -> torch.Tensor:
    """Return latents_CTHW of one sample with given frames restored, or the prediction after `sampling.stop_at`.

    Args:
        transformer: transformer on the plan's device, called like `MMDiT`.
        reference_latents: latents_CTHW of each reference; None without references.
        begun: state after `steps_done`; None for a sample that starts from noise or from a draft.
        draft_CTHW: latents of the draft. The noise is mixed with them to (1-t)·data + t·noise at the time t of the
            next step (Liu et al., arXiv 2209.03003; Meng et al., "SDEdit", arXiv 2108.01073).
        steps_done: steps that are computed or skipped.
        ranks: processes that share the work, all of which get the latents.
        on_predicted: called after each step with a function that returns the prediction.
    """
    device, settings, patch_size = plan.hardware.device, plan.settings, plan.settings.model.patch_size
    channels, num_latent_frames, rows, columns = plan.latent_shape
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
    # A seed gives the same noise on one kind of device only.
    [noise_BCTHW] = ranks.same_tensors([noise_BCTHW])
    mask_B1THW, given_BCTHW = prepare_inference_condition(
        noise_BCTHW,
        plan.mode,
        None if reference_latents is None else [reference_latents],
        settings.vae.grid.is_causal,
        lengths=settings.condition.lengths,
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

        if on_predicted is not None:
            on_predicted(step.steps_done, prediction)
        if step.steps_done == stop:
            predicted.append(prediction())

    packed_BND = denoise(
        ranks.share_branches(velocity, on_evaluation=on_evaluation),
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
