"""Continue a picture as a video: python examples/image_to_video.py [PICTURE]. Without one, the demo makes it."""

import sys

from opensora_cli import Pipeline

PROMPT = "a red boat moving left on the sea"


def main(picture: str | None = None) -> None:
    with Pipeline("demo", steps=20) as pipe:
        if picture is None:
            picture = str(pipe(PROMPT, num_frames=1).save("samples/boat.png"))
        video = pipe(PROMPT, ref=picture, cond="i2v_head", image_guidance_scale=3)
    print(f"{video.save('samples/boat.mp4')}: the given frame came out at {video.report.given_frames_psnr_db:.1f} dB")


if __name__ == "__main__":
    main(*sys.argv[1:2])
