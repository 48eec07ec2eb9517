"""The mathematics of a training step where the golden file is not sharp: the noise that is left, and the shift."""

import pytest
import torch
from closeness import assert_close

from opensora_cli.engine.train.objectives.mmdit import flow_target, get_batch_loss, noisy_latents

SIGMA = 0.2


def pair():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 4, generator=generator), torch.randn(2, 3, 4, generator=generator)


def test_the_target_is_the_derivative_by_time():
    data, noise = (value.double() for value in pair())
    t = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
    noisy_latents(data, noise, t, sigma_min=SIGMA).sum().backward()
    target = flow_target(data, noise, sigma_min=SIGMA)
    assert_close(t.grad, target.sum(dim=(1, 2)))


def test_loss_is_taken_in_float32():
    velocity = torch.full((1, 1, 2), 256.0, dtype=torch.bfloat16)
    loss = get_batch_loss(velocity, torch.tensor([[[255.0, 258.0]]]))
    assert (loss.dtype, loss.item()) == (torch.float32, 2.5)


class TestMaskedLoss:
    """Two tokens a frame; the error of frame i is (i+1)² everywhere."""

    @staticmethod
    def loss(*given):
        frames = len(given[0])
        velocity = torch.arange(1.0, frames + 1).repeat_interleave(2).view(1, -1, 1).expand(len(given), -1, 3)
        masks = torch.tensor(given, dtype=torch.float32).view(len(given), frames, 1, 1).expand(-1, -1, 4, 2)
        return get_batch_loss(velocity, torch.zeros_like(velocity), masks).item()

    @pytest.mark.parametrize(
        ("given", "learned"),
        [
            ([0, 0, 0, 0], [1, 2, 3, 4]),
            ([1, 0, 0, 0], [2, 3, 4]),
            ([0, 0, 0, 1], [1, 2, 3]),
            ([1, 0, 0, 1], [2, 3]),
            ([1, 1, 0, 0], [1, 2, 3, 4]),
            ([0, 0, 1, 1], [1, 2, 3, 4]),
            ([1, 0, 1, 1], [1, 2, 3, 4]),
            ([0], [1]),
            ([1, 0], [2]),
        ],
    )
    def test_ends_are_left_out_unless_frames_between_are_given(self, given, learned):
        assert self.loss(given) == pytest.approx(sum(frame**2 for frame in learned) / len(learned))

    def test_every_sample_counts_alike(self):
        alone = [self.loss(given) for given in ([1, 0, 0], [0, 0, 0])]
        assert self.loss([1, 0, 0], [0, 0, 0]) == pytest.approx(sum(alone) / 2)

    @pytest.mark.parametrize("given", [[1], [1, 1]])
    def test_nothing_left_is_zero(self, given):
        assert self.loss(given) == 0.0

    def test_masks_of_other_clips_are_refused(self):
        velocity = torch.zeros(2, 6, 3)
        for shape in ((1, 3, 1, 1), (2, 4, 1, 1)):
            with pytest.raises(ValueError, match="tokens are not"):
                get_batch_loss(velocity, velocity, torch.zeros(shape))
        # As conditions have them: the channel would pass for the frames, and the loss of given clips be 0.
        with pytest.raises(ValueError, match=r"are not \(batch, frames, height, width\)"):
            get_batch_loss(velocity, velocity, torch.zeros(2, 1, 3, 1, 1))
