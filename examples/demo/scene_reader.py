"""A classifier that reads back from a clip what its caption says: place, weather, time, and the thing's shape, colour,
direction and speed.

It judges generated videos and has never seen one: it is trained on rendered clips alone, of combinations that are not
held out. So that it can be asked about videos that are a little softer or noisier than renders, the renders are
degraded while it is trained.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demo_world.scenes import (
    Colour,
    Direction,
    Place,
    Scene,
    Shape,
    Speed,
    Time,
    Weather,
    render_scene,
    sample_scene,
)
from opensora_cli.core.device import multiplies_bf16
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.files import atomic_path

Clips = NDArray[np.uint8]
"""(N, T, H, W, 3), RGB."""

NOTHING = "nothing"
"""Answer about a moving thing that is not there: a video that lacks it must not be right by luck."""
ANSWERS: Mapping[str, tuple[str, ...]] = {
    "place": tuple(Place),
    "weather": tuple(Weather),
    "time": tuple(Time),
    "shape": (*Shape, NOTHING),
    "colour": (*Colour, NOTHING),
    "direction": (*Direction, NOTHING),
    "speed": (*Speed, NOTHING),
}

SIZE = 64
"""Pixels a side that are looked at; other clips are resized."""
FRAMES = 5
"""Frames that are looked at: they show a motion as well as all of them."""
_CHUNK = 50
_STEPS = 700
_Z = 1.96
"""Standard deviations to either side of the mean that hold 95 % of a normal distribution."""


def frames_a_second(num_frames: int, fps: float) -> float:
    """Return how many frames in a second a reader looks at, from the first frame of such a clip to its last."""
    return fps / ((num_frames - 1) // (FRAMES - 1))


def right_answers(scene: Scene) -> list[int]:
    """Return the index of the right one of `ANSWERS` for each attribute."""
    thing = scene.thing
    said: list[str] = [scene.place, scene.weather, scene.time]
    said += [NOTHING] * 4 if thing is None else [thing.shape, thing.colour, thing.direction, thing.speed]
    return [answers.index(answer) for answers, answer in zip(ANSWERS.values(), said, strict=True)]


def frames_to_read(clips_NTHWC: Clips, *, fps: float, every: float) -> Tensor:
    """Return the frames that the reader looks at, in [0, 1], (N, FRAMES, 3, SIZE, SIZE).

    Args:
        clips_NTHWC: clips, of which the first frames `1 / every` seconds apart are taken.
        fps: of the clips.
        every: how many are looked at in a second.

    Raises:
        ValueError: they are too short.
    """
    indices = [round(k * fps / every) for k in range(FRAMES)]
    if indices[-1] >= clips_NTHWC.shape[1]:
        raise ValueError(f"{indices[-1] + 1} frames at {fps:g} fps are needed, not {clips_NTHWC.shape[1]}")
    frames_NTCHW = torch.from_numpy(clips_NTHWC[:, indices]).permute(0, 1, 4, 2, 3).float() / 255.0
    if frames_NTCHW.shape[-2:] == (SIZE, SIZE):
        return frames_NTCHW
    flat = nn.functional.interpolate(frames_NTCHW.flatten(0, 1), size=(SIZE, SIZE), mode="bilinear", antialias=True)
    return flat.view(*frames_NTCHW.shape[:3], SIZE, SIZE)


class _Block(nn.Module):
    """Two convolutions beside a shortcut, halving the picture."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(nn.functional.relu(self.norm1(self.conv1(hidden_BCHW)))))
        return nn.functional.relu(residual + self.shortcut(nn.functional.avg_pool2d(hidden_BCHW, 2)))


class Reader(nn.Module):
    """A small residual network over the frames stacked as channels, with one head for each attribute.

    Args:
        every: frames in a second that it looks at.
        width: channels after the first layer; they double twice.
    """

    def __init__(self, every: float, *, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.every = every
        self.stem = nn.Conv2d(3 * FRAMES, width, 5, stride=2, padding=2, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(_Block(width, 2 * width), _Block(2 * width, 4 * width))
        self.heads = nn.ModuleDict({name: nn.Linear(8 * width, len(answers)) for name, answers in ANSWERS.items()})

    def forward(self, frames_BTCHW: Tensor) -> dict[str, Tensor]:
        """Return for each attribute the logits of its answers, from frames as `frames_to_read` gives them."""
        stacked = (2.0 * frames_BTCHW - 1.0).flatten(1, 2).contiguous(memory_format=torch.channels_last)
        hidden = self.blocks(nn.functional.relu(self.norm(self.stem(stacked))))
        pooled = torch.cat([hidden.mean(dim=(2, 3)), hidden.amax(dim=(2, 3))], dim=1)
        return {name: head(pooled) for name, head in self.heads.items()}

    @torch.no_grad()
    def read(self, clips_NTHWC: Clips, *, fps: float) -> Tensor:
        """Return the index of the answer to each of `ANSWERS`, (N, 7)."""
        was_training = self.training
        self.eval()
        read = []
        for start in range(0, len(clips_NTHWC), _CHUNK):
            logits = self(frames_to_read(clips_NTHWC[start : start + _CHUNK], fps=fps, every=self.every))
            read.append(torch.stack([each.argmax(dim=1) for each in logits.values()], dim=1))
        self.train(was_training)
        return torch.cat(read)


def accuracy(
    read_NA: Tensor, scenes: Sequence[Scene], *, attributes: Sequence[str] = tuple(ANSWERS)
) -> dict[str, float]:
    """Return the share of clips, 0 to 1, of which each attribute is read as the scene has it, and their mean."""
    right_A = (read_NA == torch.tensor([right_answers(scene) for scene in scenes])).double().mean(dim=0)
    shares = {name: share for name, share in zip(ANSWERS, right_A.tolist(), strict=True) if name in attributes}
    return {**shares, "mean": sum(shares.values()) / len(shares)}


STILL = ("place", "weather", "time", "shape", "colour")
"""Answers that a single frame shows."""


def read_frame(reader: Reader, frames_NHWC: Clips, *, num_frames: int, fps: float) -> Tensor:
    """Return the answers (N, 7) read from single frames, shown as clips that stand still.

    Answers other than `STILL` mean nothing.
    """
    return reader.read(np.repeat(frames_NHWC[:, None], num_frames, axis=1), fps=fps)


def confidence_interval(share: float, count: int) -> tuple[float, float]:
    """Return between what the true share lies with 95 % confidence, of one that was found in `count` (Wilson 1927)."""
    spread = _Z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    margin = _Z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, middle - margin), min(1.0, middle + margin)


def degrade(frames_BTCHW: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return frames, in [0, 1], as a bad camera or a lossy codec would show them; each clip in its own way.

    Some clips lose resolution, some show an echo of the frame before; all get a little of another light, of blotches
    and of grain. How much is drawn for each clip, from nothing upwards.
    """

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand((len(frames_BTCHW), 1, 1, 1, 1), generator=generator)

    batch, num_frames, channels, height, width = frames_BTCHW.shape
    softened = []
    for part in frames_BTCHW.chunk(8):
        share = 0.3 + 0.7 * torch.rand((), generator=generator).item()
        small = (round(share * height), round(share * width))
        flat = nn.functional.interpolate(part.flatten(0, 1), size=small, mode="bilinear", antialias=True)
        softened.append(nn.functional.interpolate(flat, size=(height, width), mode="bilinear").view_as(part))
    frames = torch.where(uniform(0, 1) < 0.7, torch.cat(softened), frames_BTCHW)

    before = torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
    frames = torch.lerp(frames, before, uniform(-0.3, 0.3).clamp(min=0.0))

    blotches = torch.randn((batch * num_frames, channels, height // 8, width // 8), generator=generator)
    blotches = nn.functional.interpolate(blotches, size=(height, width), mode="bilinear").view_as(frames)
    grain = torch.randn(frames.shape, generator=generator)
    tint = 0.05 * torch.randn((batch, 1, channels, 1, 1), generator=generator)
    frames = frames * (uniform(0.88, 1.12) + tint) + uniform(-0.04, 0.04)
    return (frames + uniform(0, 0.06) * blotches + uniform(0, 0.05) * grain).clamp(0.0, 1.0)


def training_batch(rng: np.random.Generator, *, batch_size: int, every: float) -> tuple[Tensor, Tensor]:
    """Return fresh degraded frames (B, FRAMES, 3, SIZE, SIZE) of scenes that are not held out, and answers (B, 7).

    Half of the clips are shown in a mirror and half backwards, and their direction is answered accordingly. Things look
    where they go; in a film shown backwards they do not, so that the direction can only be read from the motion.
    """
    scenes = [sample_scene(rng) for _ in range(batch_size)]
    clips = np.stack([render_scene(scene, size=SIZE, num_frames=FRAMES, fps=every) for scene in scenes])
    frames = frames_to_read(clips, fps=every, every=every)
    answers = torch.tensor([right_answers(scene) for scene in scenes])
    mirrored, backwards = (torch.from_numpy(rng.random(batch_size) < 0.5) for _ in range(2))
    frames = torch.where(mirrored.view(-1, 1, 1, 1, 1), frames.flip(4), frames)
    frames = torch.where(backwards.view(-1, 1, 1, 1, 1), frames.flip(1), frames)
    column = list(ANSWERS).index("direction")
    turned = (mirrored ^ backwards) & (answers[:, column] < len(Direction))
    answers[:, column] = torch.where(turned, 1 - answers[:, column], answers[:, column])
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    return degrade(frames, generator=generator), answers


def train_reader(
    every: float,
    *,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    width: int = 32,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Reader:
    """Return a reader trained with AdamW at a rate that rises and falls once, in bfloat16 (where the CPU
    multiplies it) with weights in float32.

    Args:
        every: frames in a second that it looks at.
        steps: updates, each on fresh clips.
        batch_size: clips of an update.
        learning_rate: its highest.
        width: of the reader.
        seed: of the first weights and all clips.
        say: called with the loss now and then.
    """
    torch.manual_seed(seed)
    reader = Reader(every, width=width).train()
    reader.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
    optimizer = torch.optim.AdamW(reader.parameters(), lr=learning_rate, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.2)
    in_bfloat16 = multiplies_bf16(torch.device("cpu"))
    started = time.perf_counter()
    for step in range(1, steps + 1):
        frames, answers = training_batch(np.random.default_rng((seed, step)), batch_size=batch_size, every=every)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bfloat16):
            logits = reader(frames)
        losses = [
            nn.functional.cross_entropy(logits[name].float(), answers[:, column]) for column, name in enumerate(ANSWERS)
        ]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            each = "  ".join(f"{name} {value.item():.3f}" for name, value in zip(ANSWERS, losses, strict=True))
            say(f"reader: step {step} of {steps}, {time.perf_counter() - started:.0f} s, cross-entropy: {each}")
    return reader.eval()


def save_reader(reader: Reader, path: Path) -> None:
    """Write the weights; OutputError if that fails."""
    with atomic_path(path) as temporary:
        torch.save({"width": reader.width, "every": reader.every, "weights": reader.state_dict()}, temporary)


def load_reader(path: Path) -> Reader:
    """Return the reader that `save_reader` wrote.

    Raises:
        CheckpointError: the file is missing or not a reader.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        reader = Reader(saved["every"], width=saved["width"])
        reader.load_state_dict(saved["weights"])
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} is not a reader: {reason}", hint="remove it, and a new one is trained"
        ) from error
    return reader.eval()


def obtain_reader(path: Path, *, num_frames: int, fps: float, say: Callable[[str], None]) -> Reader:
    """Return the reader in a file. If there is none for such clips, train it and save it there."""
    every = frames_a_second(num_frames, fps)
    if path.exists() and (reader := load_reader(path)).every == every:
        return reader
    say(f"training a reader, {_STEPS} steps, for {path}")
    reader = train_reader(every, steps=_STEPS, say=say)
    save_reader(reader, path)
    return reader
