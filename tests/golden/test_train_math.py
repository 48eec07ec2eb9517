"""One training step of flow matching against the reference: times, noisy latents, target and loss."""

import torch

from opensora_cli.engine.train.objectives.mmdit import flow_target, get_batch_loss, noisy_latents
from opensora_cli.sampling.schedule import flow_shift_for, shifted_times


def test_train_math(golden, assert_close):
    file = golden("train_math")
    frames, height, width = file.config["latent_shape"]
    inputs, outputs, sigma_min = file.inputs, file.outputs, file.config["sigma_min"]

    shift = flow_shift_for(tokens_per_frame=height * width // 4, num_latent_frames=frames)
    t = shifted_times(torch.sigmoid(inputs["u"]), shift)
    assert_close(t, outputs["t"], what="time")
    noisy = noisy_latents(inputs["x0"], inputs["x1"], outputs["t"], sigma_min=sigma_min)
    assert_close(noisy, outputs["x_t"], what="noisy latents")
    target = flow_target(inputs["x0"], inputs["x1"], sigma_min=sigma_min)
    assert_close(target, outputs["velocity"], what="target")
    loss = get_batch_loss(inputs["pred"], inputs["target"])
    assert_close(loss.reshape(1), outputs["loss_plain"], what="loss")
    masked = get_batch_loss(inputs["pred"], inputs["target"], inputs["masks"])
    assert_close(masked.reshape(1), outputs["loss_masked"], what="masked loss")
