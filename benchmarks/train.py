"""Measure the cost of the training loop itself: steps of the trainer against steps of a plain loop.

    python benchmarks/train.py --json train.json

Both train the demo's transformer, and a block of the released width, on the same encoded clips, with the same
optimizer, precision, clipping and average, and only text to video. They alternate in pairs, in one process, on a GPU if
there is one. The trainer also checks for finite values, and writes each step to its log and TensorBoard. The exit code
is 1 if a goal is missed. The log of `osora train` has the seconds in which a step waits for data.
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speed_pairs import Row, compared, report
from torch import Tensor, nn

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.device import torch_dtype
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import ClipBatch
from opensora_cli.engine.encode.clips import (
    LATENTS,
    POOLED_PROMPT_EMBEDS,
    PROMPT_EMBEDS,
    CachedClip,
    EmptyPrompt,
    FreshClip,
    encode_for_cache,
    load_encoders,
)
from opensora_cli.engine.train.build import build_task
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.memory import largest_batch_shape
from opensora_cli.engine.train.metrics import Metrics
from opensora_cli.engine.train.trainer import StepReport, Trainer
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids
from opensora_cli.sampling.schedule import flow_shift_for
from opensora_cli.settings.layers import Given
from opensora_cli.settings.train import TrainSettings, load_train_settings

SCHEMA = "osora.bench.train/2"
GOAL = 1 / 1.01
"""Required speedup: at most a hundredth slower."""
_BATCHES, _CLIP_SIZE = 4, 128
_CAPTION = "raining, sea"
_WITHOUT_BF16 = {"train_mmdit.frozen_dtype": "float32", "train_mmdit.attention": "sdpa"}
"""Settings without bfloat16, which takes many times as long on processors without native bfloat16 products."""
_RELEASED = {
    "model.hidden_size": "3072",
    "model.num_heads": "24",
    "model.axes_dim": "16,56,56",
    "model.depth": "0",
    "model.depth_single_blocks": "1",
}
"""Settings of a block with the released width. Weights, gradients, moments and averages of both loops are 5 GB."""


def demo_settings(batch_size: int, compute: str, changes: Mapping[str, str]) -> TrainSettings:
    """Return settings to train the demo's transformer from random weights on clips of 9 frames.
    Training uses the packaged frozen parts, AdamW at a constant rate, and only text to video.
    """
    given = {
        "init": "none",
        "lora.rank": "none",
        "data.workers": "0",
        "data.buckets": f"{{128px: {{9: [1.0, {batch_size}]}}}}",
        "precision.compute": compute,
        **(_WITHOUT_BF16 if compute == "fp32" else {}),
        "optimizer.learning_rate": "1e-3",
        "optimizer.warmup_steps": "0",
        "loop.ema_decay": "0.998",
        "loop.log_every": "1",
        "watching.tensorboard": "true",
        "train_mmdit.cache": "none",
        **{f"train_mmdit.mode_weights.{mode}": str(int(mode == "t2v")) for mode in CONDITION_MODES},
        **changes,
    }
    overrides = {key: Given(value, "the benchmark") for key, value in given.items()}
    return load_train_settings(config=Path("demo_lora"), overrides=overrides, environment={})


class FixedBatches:
    """Cycle of a few micro-batches with increasing numbers.

    Args:
        batches: the micro-batches to repeat.
    """

    epoch = 0

    def __init__(self, batches: Sequence[ClipBatch]) -> None:
        self._batches = batches
        self._number = 0

    def next(self) -> ClipBatch:
        """Return the next micro-batch."""
        batch = replace(self._batches[self._number % len(self._batches)], number=self._number)
        self._number += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because no run is resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainLoop:
    """Plain training loop for one device: everything is in `step`, and nothing is checked or logged.

    Args:
        model: the model, trained in place.
        batches: micro-batches, used in a cycle.
        empty: embeddings that replace those of dropped captions.
        settings: the settings of the trainer.
        device: the device of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[ClipBatch],
        *,
        empty: EmptyPrompt,
        settings: TrainSettings,
        device: torch.device,
    ) -> None:
        chosen = settings.optimizer
        self._model, self._settings, self._device = model, settings, device
        self._weights: list[Tensor] = list(model.parameters())
        self._averages = [weight.detach().clone() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=chosen.learning_rate,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
            fused=True,
        )
        self._clips: list[tuple[CachedClip, ...]] = [batch.cached or () for batch in batches]
        self._empty_LC = empty.prompt_embeds_LC.to(device).float()
        self._empty_V = empty.pooled_prompt_embeds_V.to(device).float()
        self._steps = 0
        torch.manual_seed(0)

    def step(self) -> float:
        """Do one step and return its loss."""
        clips, device, patch = self._clips[self._steps % len(self._clips)], self._device, 4
        latents = torch.stack([clip[LATENTS] for clip in clips]).to(device).float()
        count, _, frames, height, width = latents.shape
        prompt = torch.stack([clip[PROMPT_EMBEDS] for clip in clips]).to(device).float()
        prompt = torch.where(self._drop(count)[:, None, None], self._empty_LC, prompt)
        pooled = torch.stack([clip[POOLED_PROMPT_EMBEDS] for clip in clips]).to(device).float()
        pooled = torch.where(self._drop(count)[:, None], self._empty_V, pooled)
        data, noise = pack_latents(latents, patch), pack_latents(torch.randn_like(latents), patch)
        shift = flow_shift_for(tokens_per_frame=height * width // 4, num_latent_frames=frames)
        share = torch.sigmoid(torch.randn(count, device=device))
        times = shift * share / (1 + (shift - 1) * share)
        noisy = torch.lerp(data, noise, times[:, None, None])
        nothing_given = pack_conditioning(torch.zeros_like(latents[:, :1]), torch.zeros_like(latents), patch)
        dtype = torch_dtype(self._settings.precision.compute)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            velocity = self._model(
                noisy,
                position_ids_BN3=position_ids(count, frames, height // patch, width // patch, device=device),
                timesteps_B=times,
                prompt_embeds_BLC=prompt,
                pooled_prompt_embeds_BV=pooled,
                conditioning_BNK=nothing_given,
            )
            loss = nn.functional.mse_loss(velocity.float(), noise - data)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._weights, self._settings.optimizer.max_grad_norm)
        self._optimizer.step()
        decay = self._settings.loop.ema_decay
        assert decay is not None
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self._weights, 1 - decay)
        self._steps += 1
        return loss.item()

    def _drop(self, count: int) -> Tensor:
        return torch.rand(count, device=self._device) < self._settings.train_mmdit.t5_dropout


def color_field(num_frames: int, size: int, number: int) -> Tensor:
    """Return a clip of smooth random colors that change over time: uint8 RGB (num_frames, size, size, 3)."""
    corners_13THW = torch.rand(1, 3, 2, 5, 5, generator=torch.Generator().manual_seed(number))
    shape = (num_frames, size, size)
    levels_13THW = nn.functional.interpolate(corners_13THW, size=shape, mode="trilinear", align_corners=True)
    return (levels_13THW[0] * 255).round().to(torch.uint8).permute(1, 2, 3, 0)


def encoded_batches(settings: TrainSettings, device: torch.device) -> tuple[list[ClipBatch], EmptyPrompt]:
    """Return a few micro-batches like those of a cache, and the empty prompt."""
    encoders = load_encoders(settings, device=device)
    batches = []
    for number in range(_BATCHES):
        shape = largest_batch_shape(settings)
        batch = replace(shape.zeros(), number=number)
        clips = []
        for index, request in enumerate(batch.requests):
            pixels_THWC = color_field(shape.num_frames, _CLIP_SIZE, shape.batch_size * number + index)
            clips.append(FreshClip(encoders, pixels_THWC, replace(request, caption=_CAPTION), settings.train_mmdit))
        cached = tuple(CachedClip(encode_for_cache(clip, {})) for clip in clips)
        batches.append(replace(batch, pixels_BTHWC=None, cached=cached))
    return batches, encoders.empty_prompt


@contextmanager
def watched_trainer(
    settings: TrainSettings, batches: FixedBatches, device: torch.device
) -> Iterator[tuple[Trainer, Callable[[], StepReport]]]:
    """Yield the trainer of `osora train`, and its step that also writes the log and the files of TensorBoard."""
    distribution, reporter = Distribution(device), SilentReporter()
    with tempfile.TemporaryDirectory() as folder:
        metrics = Metrics(settings, distribution=distribution, output=Path(folder), reporter=reporter)
        trainer = Trainer(
            build_task(settings, distribution=distribution, reporter=reporter),
            batches,
            loop=settings.loop,
            optimizer=settings.optimizer,
            compute=settings.precision.compute,
            distribution=distribution,
            clock=metrics.clock,
        )

        def step() -> StepReport:
            report = trainer.do_step()
            metrics.on_step(report)
            return report

        metrics.start(0)
        try:
            yield trainer, step
        finally:
            metrics.close()


def measure_steps(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Yield rows for a step of the demo in each precision, and for a step of a block of the released width."""
    computes = ("fp32", "bf16") if device.type == "cuda" else ("fp32",)
    models = [(f"demo, {compute}", options.batch_size, compute, {}) for compute in computes]
    models.append(("a block of the released width", 1, computes[-1], _RELEASED))
    for name, batch_size, compute, changes in models:
        batches, empty = encoded_batches(demo_settings(batch_size, compute, {}), device)
        settings = demo_settings(batch_size, compute, changes)
        with watched_trainer(settings, FixedBatches(batches), device) as (trainer, step):
            # There is only one copy of large weights, which both loops train.
            module = trainer.task.module if changes else copy.deepcopy(trainer.task.module)
            plain = PlainLoop(module, batches, empty=empty, settings=settings, device=device)
            yield compared(f"a step, {name}", plain.step, step, pairs=options.pairs, goal=GOAL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8, help="clips of a step")
    parser.add_argument("--pairs", type=int, default=30, help="of steps")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = (("train", row) for row in measure_steps(options, device))
    return 0 if report(rows, options.json, schema=SCHEMA, more={"device": str(device)}) else 1


if __name__ == "__main__":
    sys.exit(main())
