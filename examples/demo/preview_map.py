"""Fit the colors of the demo's latents for `--preview-every` to scenes, and measure the error of previews.

    python examples/demo/preview_map.py
    python examples/demo/preview_map.py --write

Prints the PSNR of previews of held-out scenes, and of a grey picture, against what they should show: the scene, scaled
down to one pixel for each latent position. `--write` replaces the map that comes with osora.
"""

import argparse

import torch

from demo_world.scene_clips import SceneClip
from opensora_cli.core.files import write_json_atomic
from opensora_cli.engine.components.architectures import load_autoencoder
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.generate.previews import demo_map_file, fit_preview_map, preview_example
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.similarity import psnr_db
from opensora_cli.settings.load import load_preset

CLIPS, HELD_OUT_CLIPS = 8, 24


def scene(number: int, *, seed: int, held_out: bool = False) -> torch.Tensor:
    """Return a rendered scene (3, T, H, W) in [-1, 1]."""
    clip_THWC = SceneClip(seed=seed, number=number, held_out=held_out).render(size=64, num_frames=9, fps=12)
    return (torch.from_numpy(clip_THWC).double() / 127.5 - 1).permute(3, 0, 1, 2)


def main() -> None:
    """Fit, measure, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the map that comes with osora")
    arguments = parser.parse_args()
    settings = load_preset("demo", prompt="any")
    weights = packaged_demo() / settings.files.vae
    with torch.inference_mode():
        autoencoder = load_autoencoder(settings.vae, weights, device=torch.device("cpu"), dtype=torch.float32)
        colors = fit_preview_map(autoencoder, (scene(number, seed=0) for number in range(CLIPS)))
        previews, expected = [], []
        for number in range(HELD_OUT_CLIPS):
            latents_CTHW, colors_3THW = preview_example(autoencoder, scene(number, seed=1, held_out=True))
            previews.append(colors.frames(latents_CTHW))
            expected.append(to_uint8(colors_3THW))
    shown, right = torch.cat(previews), torch.cat(expected)
    grey = torch.full_like(right, int(right.float().mean()))
    print(f"previews of {HELD_OUT_CLIPS} held-out scenes: {psnr_db(shown, right):.1f} dB")
    print(f"a grey picture: {psnr_db(grey, right):.1f} dB")
    if arguments.write:
        write_json_atomic(demo_map_file(), colors.to_json())
        print(f"written: {demo_map_file()}")


if __name__ == "__main__":
    main()
