"""The map of the demo's previews, which is fitted to scenes."""

import pytest
import torch

from demo_world.scene_clips import SceneClip
from opensora_cli.engine.components.architectures import load_autoencoder
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.generate.previews import demo_map_file, fit_preview_map, read_map
from opensora_cli.media.resize import fit_frames, to_uint8
from opensora_cli.media.similarity import psnr_db
from opensora_cli.settings.load import load_preset
from preview_map import CLIPS, scene


def demo_autoencoder():
    settings = load_preset("demo", prompt="any")
    weights = packaged_demo() / settings.files.vae
    return load_autoencoder(settings.vae, weights, device=torch.device("cpu"), dtype=torch.float32)


def test_previews_of_the_demo_are_near_to_what_it_decodes():
    colors = read_map(demo_map_file())
    with torch.inference_mode():
        vae = demo_autoencoder()
        clip = SceneClip(seed=2, number=0, held_out=True).render(size=64, num_frames=5, fps=12)
        latents_1CTHW = vae.encode((torch.from_numpy(clip) / 127.5 - 1).permute(3, 0, 1, 2)[None])
        decoded_THWC = to_uint8(vae.decode(latents_1CTHW)[0])
    small_THWC = to_uint8(fit_frames(decoded_THWC, height=16, width=16, picture=True))
    shown_THWC = colors.frames(latents_1CTHW[0])
    assert shown_THWC.shape == (2, 16, 16, 3)
    # The second latent frame is of four frames, of which it shows the mean.
    expected = torch.stack([small_THWC[0], small_THWC[1:].float().mean(0).round().to(torch.uint8)])
    grey = torch.full_like(expected, int(expected.float().mean()))
    assert psnr_db(shown_THWC, expected) > psnr_db(grey, expected) + 4


@pytest.mark.slow
def test_the_map_of_the_demo_is_that_of_its_weights():
    with torch.inference_mode():
        fitted = fit_preview_map(demo_autoencoder(), (scene(number, seed=0) for number in range(CLIPS)))
    shipped = read_map(demo_map_file())
    for name in ("weights", "bias"):
        found, expected = (torch.tensor(getattr(each, name)) for each in (fitted, shipped))
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
