"""Generate a video from a prompt: python examples/generate_a_video.py [PROMPT]."""

import sys

from opensora_cli.engine.generate.run import generate
from opensora_cli.settings.load import load_preset


def main(prompt: str = "raining, sea") -> None:
    settings = load_preset("demo", prompt=prompt).replace(
        {"sampling.seed": 7, "sampling.num_inference_steps": 20, "output.path": "samples/example.mp4"}
    )
    result = generate(settings)
    video = result.videos[0]
    print(f"{video.path}: seed {video.seed}, {sum(result.timings_s.values()):.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:2])
