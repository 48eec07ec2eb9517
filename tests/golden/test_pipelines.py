"""Whole generations, from the bytes of references and the seed of the noise to video, against the reference's.

Plan, references, sampling and decoding are the engine's own, in the order of a run; only text encoders and the files of
weights are left out.
"""

import pytest
import torch
from PIL import Image
from small_stages import small_stages

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.architectures import mmdit_config, new_autoencoder
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate import decode, denoise
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.references import encode_references, references_of
from opensora_cli.models.mmdit.layout import converter
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.vae.config import FluxAEConfig
from opensora_cli.settings.generate import GenerateSettings

VAE_KINDS = {"dc_ae": "dc_ae", "hunyuan_vae": "hunyuan"}
SAMPLING = {
    "num_steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "guidance_img": "image_guidance_scale",
    "text_osci": "text_oscillation",
    "image_osci": "image_oscillation",
    "scale_temporal_osci": "temporal_image_scaling",
    "seed": "seed",
}
DROPPED = 3
"""Frames that the recordings lack at each given end where the case has `is_causal_vae` false: there the reference drops
them, for models that were trained on repeated pictures. The released one was not, and here nothing is dropped."""


def sizes_of_model(config):
    return {key: value for key, value in config["mmdit"].items() if key not in ("fused_qkv", "use_liger_rope")}


def settings_of(config, vae, case, references):
    """Return what asks osora for a recorded case; `vae` are the sizes of its autoencoder."""
    kind = VAE_KINDS[config["vae"]]
    sizes = {key: value for key, value in vae.items() if key not in ("in_channels", "out_channels")}
    return GenerateSettings.model_validate(
        {
            "prompt": "any",
            "model": sizes_of_model(config),
            "vae": {"kind": kind, "spatial_tiling": False, **({kind: sizes} if kind == "dc_ae" else sizes)},
            "video": {
                **{name: case[name] for name in ("height", "width", "num_frames")},
                "causal_lengths": case["is_causal_vae"] and kind == "dc_ae",
            },
            "sampling": {ours: case[theirs] for theirs, ours in SAMPLING.items()},
            "condition": {"mode": case["mode"], "references": references},
            "runtime": {"device": "cpu", "dtype": "float32"},
        }
    )


def settings_of_pictures(config, sizes):
    """Return what asks osora for the recorded pictures; `sizes` are those of the autoencoder."""
    return GenerateSettings.model_validate(
        {
            "prompt": "any",
            "model": {"name": "flux1-dev", **sizes_of_model(config)},
            "vae": {"kind": "flux_ae", "spatial_tiling": False, "flux_ae": sizes},
            "video": {
                "num_frames": config["num_frames"],
                "resolution": config["img_resolution"],
                "resolutions": [config["img_resolution"]],
                "aspect_ratio": config["aspect_ratio"],
            },
            "sampling": {
                "num_inference_steps": config["num_steps"],
                "embedded_guidance": config["guidance"],
                "seed": config["seed"],
            },
            "runtime": {"device": "cpu", "dtype": "float32"},
        }
    )


def write_references(inputs, folder):
    """Write what is given as files, pixels unchanged, and return their paths."""
    paths = []
    for name in sorted(inputs):
        if name.startswith("reference_png"):
            paths.append(folder / f"{name}.png")
            paths[-1].write_bytes(bytes(inputs[name].tolist()))
    if "reference_video" in inputs:
        first, *others = map(Image.fromarray, inputs["reference_video"].permute(0, 2, 3, 1).contiguous().numpy())
        paths.append(folder / "reference.webp")
        first.save(paths[-1], save_all=True, append_images=others, lossless=True, exact=True, duration=40)
    return tuple(map(str, paths))


def starting_with(tensors, prefix):
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def spy_on(module, name, seen, monkeypatch):
    """Keep the first argument of a function's last call."""
    function = getattr(module, name)

    def called(first, *others):
        seen[name] = first
        return function(first, *others)

    monkeypatch.setattr(module, name, called)


@pytest.mark.parametrize("name", ["pipeline_high_compression", "pipeline_i2v_causal"])
@torch.inference_mode()
def test_from_noise_to_video(name, golden, assert_close, tmp_path, monkeypatch):
    monkeypatch.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)
    seen = {}
    for module, function in ((denoise, "restore_references"), (decode, "to_uint8")):
        spy_on(module, function, seen, monkeypatch)
    file = golden(name)
    vae_file = golden(file.config["vae"])
    embeds = PromptEmbeds(file.inputs["txt"], file.inputs["y_vec"])
    for number, (title, case) in enumerate(file.config["cases"].items()):
        inputs, expected = (starting_with(tensors, f"{title}.") for tensors in (file.inputs, file.outputs))
        folder = tmp_path / str(number)
        folder.mkdir()
        plan = make_plan(settings_of(file.config, vae_file.config, case, write_references(inputs, folder)))
        assert plan.latent_shape == inputs["noise"].shape[1:]
        assert plan.timesteps == pytest.approx(inputs["timesteps"].tolist(), rel=1e-6)
        transformer, vae = MMDiT(mmdit_config(plan.settings.model)), new_autoencoder(plan.settings.vae)
        transformer.load_state_dict(dict(converter(transformer.config)(file.params)), strict=True)
        vae.load_state_dict(vae_file.params, strict=True)

        references = references_of(plan, SilentReporter())
        given = encode_references(references, vae)
        for index, (reference, latents) in enumerate(zip(references, given, strict=True)):
            if f"reference_pixels{index}" in inputs:
                assert_close(reference.pixels_CTHW, inputs[f"reference_pixels{index}"], what=f"{title}: pixels")
            assert_close(latents, expected[f"reference_latents{index}"], what=f"{title}: reference {index}")
        latents_CTHW = denoise.sample_latents(
            plan, transformer, embeds, given if references else None, seed=plan.settings.sampling.seed
        )
        assert_close(latents_CTHW[None], expected["latents"], what=f"{title}: latents")
        if plan.mode.gives_pictures:
            assert_close(seen["restore_references"], expected["denoised"], what=f"{title}: denoised")

        drops = not case["is_causal_vae"] and plan.mode.gives_pictures
        kept = slice(
            DROPPED * (drops and plan.mode.at_head), case["num_frames"] - DROPPED * (drops and plan.mode.at_tail)
        )
        # Without tiles in time it comes as one piece.
        [frames_THWC] = decode.decode_latents(plan, vae, latents_CTHW)
        assert len(frames_THWC) == case["num_frames"]
        assert_close(seen["to_uint8"][:, kept], expected["video"][0], what=f"{title}: video")


@torch.inference_mode()
def test_from_noise_to_picture(golden, assert_close, monkeypatch):
    monkeypatch.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)
    seen = {}
    spy_on(decode, "to_uint8", seen, monkeypatch)
    file = golden("pipeline_image")
    vae_file = golden(file.config["vae"])
    sizes = {key: value for key, value in vae_file.config.items() if key in FluxAEConfig.model_fields}
    plan = make_plan(settings_of_pictures(file.config, sizes))
    assert (plan.height, plan.width) == (file.config["height"], file.config["width"])
    assert plan.timesteps == pytest.approx(file.inputs["timesteps"].tolist(), rel=1e-6)
    transformer, vae = MMDiT(mmdit_config(plan.settings.model)), new_autoencoder(plan.settings.vae)
    weights = converter(transformer.config, interleaved=True)(file.params)
    transformer.load_state_dict(dict(weights), strict=True)
    vae.load_state_dict(vae_file.params, strict=True)
    for index, noise_CTHW in enumerate(file.inputs["noise"]):
        assert plan.latent_shape == noise_CTHW.shape
        # A row for each picture, and none for a negative prompt.
        embeds = PromptEmbeds(file.inputs["txt"][index:], file.inputs["y_vec"][index:])
        if index:
            # Recorded as a batch, whose further rows are not those of any seed.
            monkeypatch.setattr(denoise, "noise_latents", lambda *_, noise=noise_CTHW, **__: noise[None])
        latents_CTHW = denoise.sample_latents(plan, transformer, embeds, None, seed=plan.settings.sampling.seed)
        assert_close(latents_CTHW, file.outputs["latents"][index], what=f"latents {index}")
        [frames_THWC] = decode.decode_latents(plan, vae, latents_CTHW)
        assert tuple(frames_THWC.shape) == (1, plan.height, plan.width, 3)
        assert_close(seen["to_uint8"], file.outputs["picture"][index], what=f"picture {index}")
