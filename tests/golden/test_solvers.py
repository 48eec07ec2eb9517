"""Solvers, with our model: Euler against runs of the reference, all against what finer and finer steps lead to."""

import math

import pytest
import torch

from opensora_cli.core.choices import Solver
from opensora_cli.core.conditions import condition_mode
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layout import converter
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.sampling.conditioning import prepare_inference_condition
from opensora_cli.sampling.denoise import denoise
from opensora_cli.sampling.guidance import Guidance, count_evaluations, guidance_scales
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids

T2V = condition_mode("t2v")


@pytest.fixture
def run(golden):
    """Return a function that samples between times, and the file."""
    file = golden("solver_truth")
    config = file.sizes(MMDiTConfig, of="mmdit")
    model = MMDiT(config).eval()
    model.load_state_dict(dict(converter(config)(file.params)), strict=True)
    noise, patch_size = file.inputs["noise"], config.patch_size
    _, _, frames, height, width = noise.shape
    mask, given = prepare_inference_condition(noise, T2V, None)

    def sampled(timesteps, solver, *, oscillates=False):
        evaluations = []
        velocity = GuidedVelocity(
            model,
            PromptEmbeds(file.inputs["txt"], file.inputs["y_vec"]),
            conditioning_BNK=pack_conditioning(mask, given, patch_size),
            position_ids_1N3=position_ids(1, frames, height // patch_size, width // patch_size),
            on_evaluation=lambda: evaluations.append(None),
        )
        guidance = Guidance(guidance_scale=file.config["guidance"], text_oscillation=oscillates)
        scales = guidance_scales(guidance, mode=T2V, timesteps=tuple(timesteps), num_latent_frames=frames)
        with torch.inference_mode():
            packed = denoise(
                velocity, pack_latents(noise, patch_size), timesteps=timesteps, scales=scales, solver=solver
            )
        assert len(evaluations) == count_evaluations(scales, solver=solver)
        return packed

    return sampled, file


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "oscillates"), [("plain", False), ("osci", True)])
def test_euler_does_what_the_reference_does(run, assert_close, steps, name, oscillates):
    sampled, file = run
    packed = sampled(file.inputs[f"timesteps_{steps}"].tolist(), Solver.EULER, oscillates=oscillates)
    assert_close(packed, file.outputs[f"{name}_{steps}"], what=f"{name}_{steps}")


def test_the_others_are_of_second_order(run):
    sampled, file = run
    times, limit = file.inputs["timesteps_400"].tolist(), file.outputs["plain_limit"]

    def error(steps, solver):
        return float((sampled(times[:: 400 // steps], solver) - limit).norm() / limit.norm())

    coarse, fine = ({solver: error(steps, solver) for solver in Solver} for steps in (10, 20))
    orders = {solver: math.log2(coarse[solver] / fine[solver]) for solver in Solver}
    assert orders == {
        Solver.EULER: pytest.approx(1, abs=0.2),
        Solver.AB2: pytest.approx(2, abs=0.3),
        Solver.HEUN: pytest.approx(2, abs=0.3),
    }
    assert max(fine[Solver.AB2], fine[Solver.HEUN]) < 0.25 * fine[Solver.EULER]
