"""The sampling loops, with our model, against runs of the reference implementation."""

import torch

from opensora_cli.core.conditions import condition_mode, reference_parts
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layout import converter
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.sampling.conditioning import prepare_inference_condition
from opensora_cli.sampling.denoise import denoise
from opensora_cli.sampling.guidance import UNGUIDED, Branch, Guidance, count_evaluations, guidance_scales
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents


def _model(file, weights):
    config = file.sizes(MMDiTConfig, of="mmdit")
    model = MMDiT(config)
    model.load_state_dict(dict(converter(config)(weights.params)), strict=True)
    return model.eval()


def _position_ids(noise_BCTHW, patch_size):
    batch, _, frames, height, width = noise_BCTHW.shape
    return position_ids(batch, frames, height // patch_size, width // patch_size)


def _run_case(file, model, case):
    """Return the final packed latents of a recorded run, and how often the model was evaluated."""
    noise, patch_size = file.inputs["noise"], model.config.patch_size
    batch, _, num_latent_frames, _, _ = noise.shape
    mode = condition_mode(case["mode"], num_latent_frames=num_latent_frames)
    files = [file.inputs["ref_first"], file.inputs["ref_last"]]
    references = [files[part.file_index] for part in reference_parts(mode)]
    mask, reference = prepare_inference_condition(noise, mode, [references] * batch)
    conditioning = pack_conditioning(mask, reference, patch_size)
    ids = _position_ids(noise, patch_size)
    evaluations = 0

    def velocity(packed_latents_BND, t, branches):
        nonlocal evaluations
        evaluations += len(branches)
        result = {}
        for branch in branches:
            # Recorded with one sample: row 0 is the prompt, row 1 the negative prompt.
            row = slice(0, 1) if branch.uses_prompt else slice(1, 2)
            result[branch] = model(
                packed_latents_BND,
                position_ids_BN3=ids,
                timesteps_B=torch.full((batch,), t),
                prompt_embeds_BLC=file.inputs["txt"][row],
                pooled_prompt_embeds_BV=file.inputs["y_vec"][row],
                conditioning_BNK=conditioning if branch.uses_conditioning else torch.zeros_like(conditioning),
            )
        return result

    guidance = Guidance(
        guidance_scale=case["guidance"],
        image_guidance_scale=case["guidance_img"],
        text_oscillation=case["text_osci"],
        image_oscillation=case["image_osci"],
        temporal_image_scaling=case["scale_temporal_osci"],
    )
    timesteps = file.inputs["timesteps"].tolist()
    scales = guidance_scales(guidance, mode=mode, timesteps=tuple(timesteps), num_latent_frames=num_latent_frames)
    with torch.inference_mode():
        packed = denoise(velocity, pack_latents(noise, patch_size), timesteps=timesteps, scales=scales)
    assert evaluations == count_evaluations(scales), case
    return packed


def test_denoise_loops(golden, assert_close):
    file = golden("denoise_loops")
    model = _model(file, golden(file.config["weights"]))
    _, _, num_latent_frames, height, width = file.inputs["noise"].shape
    assert file.config["cases"]
    for name, case in file.config["cases"].items():
        packed = _run_case(file, model, case)
        assert_close(packed, file.outputs[name], what=name)
        unpacked = unpack_latents(
            packed,
            num_latent_frames=num_latent_frames,
            height=height,
            width=width,
            patch_size=model.config.patch_size,
        )
        assert_close(unpacked, file.outputs[f"{name}.unpacked"], what=f"{name}.unpacked")


def test_denoise_distilled(golden, assert_close):
    file = golden("denoise_distilled")
    model = _model(file, golden(file.config["weights"]))
    noise, patch_size = file.inputs["noise"], model.config.patch_size
    batch = noise.shape[0]
    ids = _position_ids(noise, patch_size)

    def velocity(packed_latents_BND, t, branches):
        assert branches == (Branch.COND,)
        velocity_BND = model(
            packed_latents_BND,
            position_ids_BN3=ids,
            timesteps_B=torch.full((batch,), t),
            prompt_embeds_BLC=file.inputs["txt"],
            pooled_prompt_embeds_BV=file.inputs["y_vec"],
            embedded_guidance_B=torch.full((batch,), float(file.config["guidance"])),
        )
        return {Branch.COND: velocity_BND}

    timesteps = file.inputs["timesteps"].tolist()
    with torch.inference_mode():
        scales = (UNGUIDED,) * (len(timesteps) - 1)
        packed = denoise(velocity, pack_latents(noise, patch_size), timesteps=timesteps, scales=scales)
    assert_close(packed, file.outputs["latents_packed"], what="latents_packed")
