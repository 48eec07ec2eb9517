"""Sample videos of a model in training: of the right size, and without an effect on training."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
import tiny_frozen
import tiny_training
import torch
from toy_training import Listener

from opensora_cli.core.exceptions import OutputError
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.generate.run import generate
from opensora_cli.engine.train import evaluate
from opensora_cli.engine.train.run import train
from opensora_cli.media import write
from opensora_cli.media.names import file_stem
from opensora_cli.media.read import probe
from opensora_cli.media.results import read_tags
from opensora_cli.media.write import write_media
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import GenerateRequest, load_generate_settings

PROMPTS = ("a red boat on the sea, raining", "a car")
BOAT, CAR = "a-red-boat-on-the-sea-raining_seed0", "a-car_seed1"
SAMPLES = {
    "samples.every": 2,
    "samples.prompts": PROMPTS,
    "samples.num_inference_steps": 2,
    "samples.num_frames": 5,
    "samples.height": 48,
    "samples.width": 32,
    "samples.fps": 8,
}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_frozen.save_frozen_parts(tmp_path_factory.mktemp("frozen"))


def run(output: Path, frozen: Path, *, resume: bool = False, **changes: object) -> Path:
    train(tiny_training.mmdit_settings(output, frozen).replace(changes), resume=resume)
    return output


def weights(output: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in (output / "transformer.safetensors", *output.glob("epoch*-global_step4/ema.safetensors"))
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, frozen: Path) -> Path:
    return run(tmp_path_factory.mktemp("plain") / "run", frozen)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, frozen: Path) -> Path:
    """With everything that watches, interrupted after step 3 and resumed."""
    pytest.importorskip("tensorboard")
    output = tmp_path_factory.mktemp("watched") / "run"
    watching = {
        **SAMPLES,
        "validation.every": 2,
        "validation.table": tiny_training.HELD_OUT,
        "validation.batches": 1,
        "watching.tensorboard": True,
    }
    settings = tiny_training.mmdit_settings(output, frozen).replace(watching)
    with pytest.raises(KeyboardInterrupt, match="step 3 of 4"):
        # The two videos of step 2 are progress, too.
        train(settings, reporter=tiny_training.StopAfter(5))
    train(settings, resume=True)
    return output


@pytest.mark.slow
def test_videos_have_their_size_and_tags(watched: Path) -> None:
    files = sorted((watched / "samples").rglob("*"))
    assert [str(path.relative_to(watched / "samples")) for path in files] == [
        *("step2", f"step2/{CAR}.mp4", f"step2/{BOAT}.mp4"),
        *("step4", f"step4/{CAR}.mp4", f"step4/{BOAT}.mp4"),
    ]
    videos = [path for path in files if path.suffix]
    for path in videos:
        facts = probe(path)
        assert (facts.num_frames, facts.height, facts.width, facts.fps) == (5, 48, 32, 8.0)
        assert path.read_bytes()[4:8] == b"ftyp"
    # Each step and each prompt has a video of its own.
    assert len({path.read_bytes() for path in videos}) == 4
    tags = read_tags(watched / "samples" / "step4" / f"{CAR}.mp4")
    assert (tags["prompt"], tags["seed"], tags["step"]) == (PROMPTS[1], "1", "4")


def test_losses_and_weights_are_those_of_a_run_without_samples(watched: Path, plain: Path) -> None:
    assert tiny_training.losses(watched) == tiny_training.losses(plain)
    assert len(set(tiny_training.losses(plain))) == 4
    assert weights(watched) == weights(plain)
    assert len(weights(plain)) == 2


@pytest.mark.slow
def test_a_video_that_cannot_be_written_is_left_out_and_the_others_are_those_of_a_resumed_run(
    tmp_path: Path, frozen: Path, plain: Path, watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(pieces: Iterator[torch.Tensor], path: Path, **arguments: Any) -> Path:
        if path.parent.name == "step2" and path.stem == BOAT:
            raise OutputError(f"cannot write {path}: No space left on device")
        return write_media(pieces, path, **arguments)

    monkeypatch.setattr(evaluate, "write_media", write)
    listener = Listener()
    train(tiny_training.mmdit_settings(tmp_path, frozen).replace(SAMPLES), reporter=listener)
    video = tmp_path / "samples" / "step2" / f"{BOAT}.mp4"
    assert [text for text in listener.warnings if "video" in text] == [
        f"cannot write {video}: No space left on device: the video is skipped"
    ]
    videos = [path.relative_to(tmp_path) for path in sorted((tmp_path / "samples").rglob("*.mp4"))]
    names = (f"step2/{CAR}", f"step4/{CAR}", f"step4/{BOAT}")
    assert [str(path) for path in videos] == [f"samples/{name}.mp4" for name in names]
    assert tiny_training.losses(tmp_path) == tiny_training.losses(plain)
    # The step is in the file, and nothing that differs between the two runs.
    assert all((tmp_path / path).read_bytes() == (watched / path).read_bytes() for path in videos)


@pytest.mark.slow
def test_a_sample_is_the_video_that_generate_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[torch.Tensor] = []
    convert = write._yuv_frame

    def converted(frame_HWC: torch.Tensor, index: int, rate: Fraction) -> av.VideoFrame:
        frames.append(frame_HWC.int())
        return convert(frame_HWC, index, rate)

    # Of what H.264 makes of them, a rounding of one level changes more.
    monkeypatch.setattr(write, "_yuv_frame", converted)
    prompt = "a red boat on the sea, at sunset"
    settings = tiny_training.demo_settings(
        "demo_lora",
        tmp_path / "run",
        lora__rank="none",
        data__buckets="{32px: {13: [1.0, 1]}}",
        train_mmdit__video_latent_frames=1,
        train_mmdit__easy_latent_frames=1,
        optimizer__learning_rate=1e-12,  # practically zero
        optimizer__weight_decay=0,
        loop__steps=1,
        loop__ema_decay="none",
        samples__every=1,
        samples__prompts=prompt,
        samples__num_inference_steps=2,
    )
    train(settings)
    asked = {
        "prompt": prompt,
        "output.path": tmp_path / "generated.mp4",
        "sampling.num_inference_steps": 2,
        "runtime.device": "cpu",
        "runtime.dtype": "float32",
        "runtime.weights": packaged_demo(),
        "sampling.seed": 0,
    }
    request = GenerateRequest(overrides={key: Given(str(value), "the test") for key, value in asked.items()})
    generate(load_generate_settings(request, model=DEMO))
    assert (tmp_path / "run" / "samples" / "step1" / f"{file_stem(prompt, seed=0)}.mp4").stat().st_size
    assert (tmp_path / "generated.mp4").stat().st_size
    ours, theirs = torch.stack(frames).chunk(2)
    assert ours.shape == theirs.shape == (33, 128, 128, 3)
    assert ours.float().std() > 20
    assert (ours - theirs).abs().max() <= 2
