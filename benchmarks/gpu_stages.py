"""Parts of `gpu.py` about the other stages, memory and training."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import torch
from gpu_bench import ONE_BRANCH, Bench, Row, tried

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.device import GIB
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.attention import attention_stand_in
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.encode.encoders import EmptyPrompt
from opensora_cli.engine.estimate.transformer import evaluation_work
from opensora_cli.engine.mem_profile.measured_stages import measure_stage
from opensora_cli.engine.train.activations import largest_batch_shape, plan_activations
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask
from opensora_cli.engine.train.parallelize import checkpoint_blocks
from opensora_cli.engine.train.stand_ins import largest_batches
from opensora_cli.engine.train.trainer import Clock, Trainer
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.explain import Given
from opensora_cli.settings.train import TrainSettings, load_train_settings

_STREAMED = {"8 blocks stay": 8, "32 blocks stay": 32}
_TINY_STREAMED = {"1 block stays": 1, "2 blocks stay": 2}
_TRAINED_BLOCKS = {"model.depth": "2", "model.depth_single_blocks": "4"}
"""Blocks whose weights, gradients and moments fit into 24 GiB beside the activations."""
_TINY_TRAINED = {
    "model.hidden_size": "64",
    "model.num_heads": "2",
    "model.axes_dim": "8,12,12",
    "data.buckets": "{256px: {1: [1.0, 1]}}",
}
_STEPS = 3
LIMITS: Mapping[str, tuple[str, str]] = {
    "256px within 12 GiB": ("256px", "12GiB"),
    "768px within 16 GiB": ("768px", "16GiB"),
}


def decoding(bench: Bench) -> Iterator[Row]:
    """Yield the seconds of decoding, and its peak beside the plan."""
    for preset in ("256px", "768px"):
        plan = bench.plan(preset)
        bench.release()
        yield tried(f"decode {preset}", partial(_stage, bench, preset, "decode", {}))
        yield {"what": f"tiles of {preset}", "latent_shape": list(plan.latent_shape)}


def text(bench: Bench) -> Iterator[Row]:
    """Yield the seconds in which T5 and CLIP encode two prompts, with T5 whole and layer by layer."""
    bench.release()
    if bench.tiny:
        yield {"what": "T5 and CLIP", "skipped": "T5 has one size, which is not tiny"}
        return
    yield tried("T5 and CLIP", partial(_stage, bench, "256px", "text", {}))
    streamed = {"memory.offload": "auto", "memory.limit": "6GiB"}
    yield tried("T5 layer by layer", partial(_stage, bench, "256px", "text", streamed))


def limits(bench: Bench) -> Iterator[Row]:
    """Yield the peaks of two steps with less memory, beside their plans, and the seconds of an evaluation."""
    bench.release()
    for name, (preset, limit) in LIMITS.items():
        # No tiny model fills a limit.
        changes = {"memory.offload": "auto", "memory.limit": None if bench.tiny else limit, **ONE_BRANCH}
        yield tried(name, partial(_stage, bench, preset, "denoise", changes))


def _stage(bench: Bench, preset: str, stage: str, changes: Mapping[str, object]) -> Row:
    plan = bench.plan(preset, changes)
    planned = next(each.total_bytes for each in plan.stages if each.name == stage)
    measured = measure_stage(plan, stage, runs=1)
    return {
        "seconds": measured.times[stage].mean_s,
        "peak_gib": round(measured.peak_bytes / GIB, 3),
        "planned_gib": round(planned / GIB, 3),
        "planned_over_measured": round(planned / max(measured.peak_bytes, 1), 3),
        "offload": plan.offload.lines(),
    }


def streaming(bench: Bench) -> Iterator[Row]:
    """Yield the seconds of an evaluation with blocks from page-locked memory, relative to resident blocks."""
    for preset in ("256px", "768px"):
        resident = median(bench.evaluations(bench.plan(preset, ONE_BRANCH))[1:])
        yield {"what": "all blocks stay", "preset": preset, "seconds": resident}
        for name, blocks in (_TINY_STREAMED if bench.tiny else _STREAMED).items():
            row = tried(name, partial(_streamed, bench, preset, blocks))
            if "seconds" in row:
                row["over_resident"] = round(row["seconds"] / resident, 3)
            yield {**row, "preset": preset}


def _streamed(bench: Bench, preset: str, blocks: int) -> Row:
    plan = bench.plan(preset, {**ONE_BRANCH, "memory.offload": "blocks", "memory.resident_blocks": blocks})
    seconds = median(bench.evaluations(plan)[1:])
    peak = bench.peak_gib()
    source = str(plan.offload.host_weights)
    return {"blocks": blocks, "weights": source, "seconds": seconds, **bench.tflops(plan, seconds), "peak_gib": peak}


def training(bench: Bench) -> Iterator[Row]:
    """Yield the seconds of a step of a few blocks with the released width, on the largest micro-batch of `stage1`.
    The rate counts operations of forward and backward, without recomputation.
    """
    bench.release()
    for name, checkpointing in (("checkpointed", "full"), ("not checkpointed", "none")):
        with torch.inference_mode(False), torch.enable_grad():
            yield tried(name, partial(_trained, bench, {"memory.checkpointing": checkpointing}))
        bench.release()


def train_settings(bench: Bench, changes: Mapping[str, str]) -> TrainSettings:
    """Return the recipe `stage1` with a few blocks, for text to video only and with encoded clips."""
    given = {
        **_TRAINED_BLOCKS,
        **(_TINY_TRAINED if bench.tiny else {}),
        "train_mmdit.cache": "encoded",
        "loop.micro_batches": "1",
        "loop.ema_decay": "none",
        "memory.checkpoint_double_blocks": "none",
        **{f"train_mmdit.mode_weights.{mode}": str(int(mode == "t2v")) for mode in CONDITION_MODES},
        **changes,
    }
    overrides = {key: Given(value, "the benchmark") for key, value in given.items()}
    settings = load_train_settings(config=Path("stage1"), overrides=overrides, environment={})
    return settings.replace({"device": str(bench.device)})


def _trained(bench: Bench, changes: Mapping[str, str]) -> Row:
    chosen = train_settings(bench, changes)
    config, text_settings = mmdit_config(chosen.model), chosen.text
    with torch.device(bench.device):
        module = MMDiT(config, attention=attention_stand_in(chosen.train_mmdit.attention))
    task = MMDiTTask(
        module,
        chosen,
        empty_prompt=EmptyPrompt(
            torch.zeros(text_settings.t5_max_length, chosen.model.context_in_dim),
            torch.zeros(chosen.model.vec_in_dim),
        ),
        encoders=_no_encoders,
        device=bench.device,
    )
    distribution = Distribution(bench.device)
    trainer = Trainer(
        task,
        largest_batches(chosen),
        loop=chosen.loop,
        optimizer=chosen.optimizer,
        compute=chosen.precision.compute,
        distribution=distribution,
        clock=Clock(),
        reporter=SilentReporter(),
    )
    checkpoint_blocks(module, plan_activations(chosen))
    seconds = bench.seconds(trainer.do_step, repeats=_STEPS)
    peak = bench.peak_gib()
    shape = largest_batch_shape(chosen)
    height, width = chosen.vae.grid.latent_size(shape.height, shape.width)
    tokens = chosen.vae.grid.latent_frames(shape.num_frames) * height * width // chosen.model.patch_size**2
    work = evaluation_work(config, tokens, text_settings.t5_max_length, torch.bfloat16)
    # Backward has twice the operations of forward.
    flops = 3 * shape.batch_size * (work.product_flops + work.attention_flops)
    rate = flops / seconds / 1e12
    row = {"seconds": seconds, "clips": shape.batch_size, "tokens": tokens, "tflops": round(rate, 2), "peak_gib": peak}
    product = bench.rates.get("bfloat16")
    return row | ({"of_product_rate": round(rate / product, 4)} if product else {})


def _no_encoders() -> object:
    raise RuntimeError("clips are encoded already")
