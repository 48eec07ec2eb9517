"""Common code of the parts of `gpu.py`: sizes, plans, a transformer with random weights, and timing."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, Self

import torch

from opensora_cli.core.device import GIB, release_memory
from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.estimate.transformer import evaluation_work
from opensora_cli.engine.generate import models
from opensora_cli.engine.generate.chain import alone
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.plan import Plan, make_plan
from opensora_cli.engine.mem_profile.measured_stages import random_transformer
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.devices import OffloadMode
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.tries import tried_settings

Row = dict[str, Any]

TINY: Mapping[str, object] = {
    "model.hidden_size": 64,
    "model.num_heads": 2,
    "model.axes_dim": (8, 12, 12),
    "model.depth": 2,
    "model.depth_single_blocks": 4,
    "video.num_frames": 5,
    "video.height": 64,
    "video.width": 64,
    "vae.block_out_channels": (32, 32, 64, 64),
}
ONE_BRANCH: Mapping[str, object] = {"sampling.guidance_scale": 1.0, "sampling.image_guidance_scale": 1.0}
"""Settings with which each step is one evaluation."""


class Bench:
    """One run of the benchmark. Inside its block, parts may share a transformer."""

    def __init__(self, device: torch.device, *, tiny: bool, minutes: float) -> None:
        self.device, self.tiny = device, tiny
        self.rates: dict[str, float] = {}
        """Measured product rates, in TFLOP/s, by dtype."""
        self._start = time.monotonic()
        self._until = self._start + 60 * minutes
        self._kept: tuple[object, MMDiT] | None = None
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.release()

    def left_s(self) -> float:
        """Return the remaining seconds."""
        return self._until - time.monotonic()

    def took_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def plan(self, preset: str, changes: Mapping[str, object] | None = None) -> Plan:
        """Return the plan of a preset for 129 frames on this device; weights may be missing."""
        settings = load_preset(preset, prompt="raining, sea").replace(
            {
                "runtime.device": str(self.device),
                # A CPU may have no fast products in bf16.
                "runtime.dtype": "float32" if self.device.type == "cpu" else "bfloat16",
                "memory.offload": "none",
                "condition.mode": "t2v",
                **(TINY if self.tiny else {}),
            }
        )
        return alone(make_plan(tried_settings(settings, changes or {}))).with_threads().video

    def transformer(self, plan: Plan) -> MMDiT:
        """Return the transformer of a plan with random weights. A previous one of the same form is used again."""
        offload, settings = plan.offload, plan.settings
        form = (
            settings.model,
            settings.precision,
            settings.memory,
            offload.mode,
            offload.resident_blocks,
            settings.compile,
        )
        if self._kept is not None and self._kept[0] == form:
            models.prepare(self._kept[1], plan)
            return self._kept[1]
        self.release()
        transformer = random_transformer(plan)
        models.prepare(transformer, plan)
        if offload.mode is OffloadMode.BLOCKS:
            self._ends.enter_context(models.streamed_blocks(plan, transformer))
        self._kept = form, transformer
        return transformer

    def release(self) -> None:
        """Free the transformer."""
        self._ends.close()
        self._kept = None
        release_memory(self.device)

    def synchronized(self) -> float:
        """Wait for all work of the device, and return the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def seconds(self, run: Callable[[], object], *, repeats: int = 3, warm: bool = True) -> float:
        """Return the median seconds of a run, after a warm-up run with `warm`."""
        if warm:
            run()
        self._watch_peak()
        found = []
        for _ in range(repeats):
            start = self.synchronized()
            run()
            found.append(self.synchronized() - start)
        return median(found)

    def peak_gib(self) -> float | None:
        """Return the peak of allocated GiB since the last timing began; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return round(torch.cuda.max_memory_allocated(self.device) / GIB, 3)

    def _watch_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def embeds(self, plan: Plan) -> PromptEmbeds:
        """Return random embeddings of two prompts."""
        text, model, dtype = plan.settings.text, plan.settings.model, plan.hardware.dtype
        return PromptEmbeds(
            torch.randn(2, text.t5_max_length, model.context_in_dim, device=self.device, dtype=dtype),
            torch.randn(2, model.vec_in_dim, device=self.device, dtype=dtype),
        )

    def evaluations(self, plan: Plan, *, count: int = 3) -> list[float]:
        """Return the seconds of `count` evaluations, one per step. The first one is the warm-up."""
        transformer, embeds = self.transformer(plan), self.embeds(plan)
        short = replace(plan, timesteps=plan.timesteps[: count + 1])
        self._watch_peak()
        times = [self.synchronized()]
        sample_latents(
            short, transformer, embeds, None, seed=0, on_evaluation=lambda: times.append(self.synchronized())
        )
        return [after - before for before, after in pairwise(times)]

    def tflops(self, plan: Plan, seconds: float) -> dict[str, float]:
        """Return the rate of an evaluation of `seconds`, also relative to the measured rate of products."""
        text = plan.settings.text.t5_max_length
        work = evaluation_work(mmdit_config(plan.settings.model), plan.video_tokens, text, plan.hardware.dtype)
        rate = (work.product_flops + work.attention_flops) / seconds / 1e12
        found = {"tflops": round(rate, 2)}
        if product := self.rates.get(plan.hardware.dtype_name):
            found["of_product_rate"] = round(rate / product, 4)
        return found


def tried(what: str, measure: Callable[[], Row]) -> Row:
    """Return a row of a part, or a row with the error, so that the other rows are measured."""
    try:
        return {"what": what, **measure()}
    except Exception as error:
        return {"what": what, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
