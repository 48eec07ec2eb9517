"""Generate a video from a prompt: python examples/generate_a_video.py [PROMPT]."""

import sys

from opensora_cli import generate


def main(prompt: str = "raining, sea") -> None:
    video = generate(prompt, model="demo", steps=20, seed=7)
    path = video.save("samples/example.mp4")
    print(f"{path}: seed {video.seed}, {sum(video.report.timings_s.values()):.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:2])
