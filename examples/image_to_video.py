"""Continue a picture as a video: python examples/image_to_video.py [PICTURE]. Without one, the demo makes it."""

import sys

from opensora_cli.engine.generate.run import generate
from opensora_cli.settings.load import load_preset

PROMPT = "a red boat moving left on the sea"


def main(picture: str | None = None) -> None:
    settings = load_preset("demo", prompt=PROMPT).replace({"sampling.num_inference_steps": 20})
    if picture is None:
        still = settings.replace({"video.num_frames": 1, "output.path": "samples/boat.png"})
        picture = str(generate(still).videos[0].path)
    moving = settings.replace(
        {
            "condition.references": (picture,),
            "condition.mode": "i2v_head",
            "sampling.image_guidance_scale": 3.0,
            "output.path": "samples/boat.mp4",
        }
    )
    video = generate(moving).videos[0]
    print(f"{video.path}: the given frame came out at {video.given_frames_psnr_db:.1f} dB")


if __name__ == "__main__":
    main(*sys.argv[1:2])
