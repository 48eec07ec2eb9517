"""Objective `dmd`: continues a few-step adapter until its videos have the distribution of those of its guided model.

The adapter, the student, takes its own steps from noise up to a random one, and predicts the clip there. The critic, a
second adapter, learns to denoise such clips. The difference between a noisy clip denoised by the critic and by the
guided model, the teacher, is the direction in which the student's clips become more probable for the teacher (DMD2: Yin
et al., arXiv 2405.14867; for video: Huang et al., arXiv 2506.08009). One model in memory is teacher, student and
critic. Clips serve as captions and as given frames alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.engine.train.lora import CRITIC, is_of_critic, using_adapter
from opensora_cli.engine.train.objectives.distill import DistillTask, teacher_branches
from opensora_cli.engine.train.objectives.mmdit import PreparedClips
from opensora_cli.engine.train.trainer import MODEL, Losses, Role
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.sampling.guidance import Branch
from opensora_cli.settings.train import TrainSettings

_LEAST_DISTANCE = 1e-3
"""Smallest distance from the teacher's clip by which a direction is divided."""


class DMDTask(DistillTask):
    """Training task of a few-step adapter and its critic. The student learns in one of `critic_steps` updates."""

    _student_learns = True

    @classmethod
    def roles_of(cls, module: MMDiT, run: TrainSettings) -> dict[str, Role]:
        optimizer = run.optimizer.replace({"learning_rate": run.train_distill.critic_learning_rate})
        return {CRITIC: Role(module, optimizer, owns=is_of_critic)}

    @classmethod
    def evaluations(cls, settings: TrainSettings) -> float:
        """Return the mean number of evaluations beside the critic's own; the student's backward pass counts as one."""
        distill = settings.train_distill
        return (distill.steps - 1) / 2 + 1 + (len(teacher_branches(settings)) + 2) / distill.critic_steps

    @classmethod
    def measured_steps(cls, settings: TrainSettings) -> tuple[int, ...]:
        """Return the first step, in which both adapters learn, and the next such step."""
        return (0, settings.train_distill.critic_steps)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._student_learns = step % self._run.train_distill.critic_steps == 0

    def losses(self, batch: ClipBatch, rng: SampleRng) -> Losses:
        clips, times, first, start_BND = self._start(batch, rng)
        with torch.set_grad_enabled(self._student_learns):
            data_BND = start_BND - times[first] * self._evaluate(clips, start_BND, times[first], Branch.COND).float()
        if self._student_learns:
            yield MODEL, self._matching_loss(clips, data_BND, times, rng), {}
        data_BND = data_BND.detach()
        step, noise_BND, noisy_BND = self._noised(data_BND, times, rng)
        with using_adapter(self.module, CRITIC):
            forward = self.roles[CRITIC].forward
            velocity_BND = self._evaluate(clips, noisy_BND, times[step], Branch.COND, forward=forward)
            loss = nn.functional.mse_loss(velocity_BND.float(), noise_BND - data_BND)
            # The backward pass, which may compute blocks again, needs the critic as well.
            yield CRITIC, loss, {}

    def _matching_loss(self, clips: PreparedClips, data_BND: Tensor, times: Sequence[float], rng: SampleRng) -> Tensor:
        with torch.no_grad():
            step, _, noisy_BND = self._noised(data_BND, times, rng)
            with using_adapter(self.module, CRITIC):
                fake_BND = self._evaluate(clips, noisy_BND, times[step], Branch.COND)
            real_BND = self._guided(clips, noisy_BND, times, step)
            difference_BND = times[step] * (real_BND - fake_BND).float()
            distance_B11 = (data_BND - noisy_BND + times[step] * real_BND).abs().mean((1, 2), keepdim=True)
            target_BND = data_BND - difference_BND / distance_B11.clamp_min(_LEAST_DISTANCE)
        return 0.5 * nn.functional.mse_loss(data_BND, target_BND)

    def _noised(self, data_BND: Tensor, times: Sequence[float], rng: SampleRng) -> tuple[int, Tensor, Tensor]:
        """Return a random step of the teacher, new noise, and the data with this noise at the beginning of the step."""
        noise_BND = torch.randn(data_BND.shape, generator=rng.torch).to(data_BND)
        step = int(rng.numpy.integers(len(times) - 1))
        return step, noise_BND, torch.lerp(data_BND, noise_BND, times[step])


OBJECTIVE = DMDTask
