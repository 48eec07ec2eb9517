"""Parts of `gpu.py`: rates, evaluations, attention, settings, decoding, streaming and training."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import torch
from gpu_bench import ONE_BRANCH, Bench, Row, tried
from plain_mmdit import plain_forward

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.device import GIB
from opensora_cli.core.progress import SilentReporter
from opensora_cli.core.section import all_keys
from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.engine.components.attention import attention_stand_in
from opensora_cli.engine.encode.clips import EmptyPrompt
from opensora_cli.engine.estimate.transformer import evaluation_work
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.mem_profile.measured_stages import measure_stage
from opensora_cli.engine.mem_profile.profile import attention_costs
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.memory import largest_batch_shape, plan_activations
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask
from opensora_cli.engine.train.parallelize import checkpoint_blocks
from opensora_cli.engine.train.stand_ins import largest_batches
from opensora_cli.engine.train.trainer import Clock, Trainer
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.sampling.packing import position_ids
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given
from opensora_cli.settings.train import TrainSettings, load_train_settings

_SIDE, _TINY_SIDE = 8192, 64
_COPIED = 2**30
_PLAIN_BRANCHES = 3
_LONG_S = 5.0
"""Seconds of an evaluation that is long enough to skip the warm-up."""
_LEAST_S = 20.0
"""Remaining seconds that a setting needs to begin: compilation takes longest."""

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "defaults": {},
    "attention math": {"runtime.attention": "math"},
    "compiled": {"compile": True},
    "fp8 products": {"precision.linear": "fp8"},
    "int8 products": {"precision.linear": "int8"},
    "compiled, fp8 products": {"compile": True, "precision.linear": "fp8"},
    "weights stored in 8 bits": {"memory.fp8_storage": True},
}
"""Settings with which an evaluation of 256px is timed; settings that this version lacks are skipped."""
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


def rates(bench: Bench) -> Iterator[Row]:
    """Yield the rates of products and copies by themselves."""
    side = _TINY_SIDE if bench.tiny else _SIDE
    products = {
        "float32": lambda: _product(bench, side, torch.float32),
        "bfloat16": lambda: _product(bench, side, torch.bfloat16),
        "float16": lambda: _product(bench, side, torch.float16),
        "float8_e4m3fn": lambda: _fp8_product(bench, side),
        "int8": lambda: _int8_product(bench, side),
    }
    for name, measure in products.items():
        row = tried(f"products in {name}", measure)
        bench.rates |= {name: row["tflops"]} if "tflops" in row else {}
        yield row
    size = _COPIED // 2**20 if bench.tiny else _COPIED
    yield tried("copies in the device's memory", lambda: _copies(bench, size, pinned=None))
    for pinned in (True, False):
        where = "page-locked" if pinned else "pageable"
        yield tried(f"copies from {where} memory of the host", partial(_copies, bench, size, pinned=pinned))


def _product(bench: Bench, side: int, dtype: torch.dtype) -> Row:
    left, right = (torch.randn(side, side, device=bench.device, dtype=dtype) for _ in range(2))
    return _rate(bench.seconds(lambda: left @ right), side)


def _fp8_product(bench: Bench, side: int) -> Row:
    left, right = (torch.randn(side, side, device=bench.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return _rate(bench.seconds(product), side)


def _int8_product(bench: Bench, side: int) -> Row:
    left, right = (torch.ones(side, side, device=bench.device, dtype=torch.int8) for _ in range(2))
    return _rate(bench.seconds(lambda: torch._int_mm(left, right.t())), side)


def _rate(seconds: float, side: int) -> Row:
    return {"side": side, "seconds": seconds, "tflops": round(2 * side**3 / seconds / 1e12, 2)}


def _copies(bench: Bench, size: int, *, pinned: bool | None) -> Row:
    to = torch.empty(size, dtype=torch.uint8, device=bench.device)
    if pinned is None:
        source, moved = torch.empty_like(to), 2 * size
    else:
        moved = size
        source = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and bench.device.type == "cuda")
    seconds = bench.seconds(lambda: to.copy_(source, non_blocking=True))
    return {"bytes": size, "seconds": seconds, "gb_per_s": round(moved / seconds / 1e9, 2)}


def evaluation(bench: Bench, preset: str) -> Iterator[Row]:
    """Yield the seconds of our evaluation, and of the plain one for a branch and for three branches in a batch."""
    plan = bench.plan(preset, ONE_BRANCH)
    ours = median(bench.evaluations(plan)[1:])
    peak = bench.peak_gib()
    sizes = {"preset": preset, "tokens": plan.video_tokens + plan.settings.text.t5_max_length}
    attention = "none" if plan.attention is None else plan.attention.backend
    planned = next(stage.total_bytes for stage in plan.stages if stage.name == "denoise")
    yield {
        "what": "ours",
        **sizes,
        "attention": attention,
        "seconds": ours,
        **bench.tflops(plan, ours),
        "peak_gib": peak,
        "planned_gib": round(planned / 2**30, 3),
    }
    for branches in (1, _PLAIN_BRANCHES):
        row = tried(f"plain, {branches} branches", partial(_plain, bench, plan, branches, warm=ours < _LONG_S))
        if "seconds" in row:
            row["ours_is_faster"] = round(row["seconds"] / branches / ours, 3)
        yield {**row, **sizes}
    asked = bench.plan(preset)
    each = asked.model_evaluations / (len(asked.timesteps) - 1)
    yield {"what": "evaluations of a step", **sizes, "ours": each, "plain": _PLAIN_BRANCHES}


def _plain(bench: Bench, plan: Plan, branches: int, *, warm: bool) -> Row:
    transformer, embeds, config = bench.transformer(plan), bench.embeds(plan), plan.settings.model
    _, frames, rows, columns = plan.latent_shape
    patch, dtype = config.patch_size, plan.hardware.dtype
    ids = position_ids(1, frames, rows // patch, columns // patch, device=bench.device).expand(branches, -1, -1)
    tokens = torch.randn(branches, plan.video_tokens, config.in_channels, device=bench.device, dtype=dtype)
    channels = transformer.config.conditioning_channels
    given = torch.zeros(branches, plan.video_tokens, channels, device=bench.device, dtype=dtype)

    def run() -> torch.Tensor:
        return plain_forward(
            transformer,
            tokens,
            position_ids_BN3=ids,
            timesteps_B=torch.full((branches,), 0.5, device=bench.device, dtype=dtype),
            prompt_embeds_BLC=embeds.prompt_embeds_2LC[:1].expand(branches, -1, -1),
            pooled_prompt_embeds_BV=embeds.pooled_prompt_embeds_2V[:1].expand(branches, -1),
            conditioning_BNK=given,
        )

    seconds = bench.seconds(run, repeats=1, warm=warm)
    return {"seconds": seconds, **bench.tflops(plan, seconds / branches), "peak_gib": bench.peak_gib()}


def attention(bench: Bench) -> Iterator[Row]:
    """Yield the figures of each kind of attention at the lengths of both presets."""
    for preset in ("256px", "768px"):
        plan = bench.plan(preset)
        model, tokens = plan.settings.model, plan.video_tokens + plan.settings.text.t5_max_length
        for cost in attention_costs(plan.hardware, model, reporter=SilentReporter(), lengths=(tokens,)):
            row: Row = {"what": cost.kind, "preset": preset, "tokens": tokens}
            if cost.seconds is None:
                yield row | {"skipped": cost.reason}
            else:
                rate = 4 * tokens**2 * model.hidden_size / cost.seconds / 1e12
                yield row | {"seconds": cost.seconds, "bytes": cost.memory_bytes, "tflops": round(rate, 2)}


def settings(bench: Bench) -> Iterator[Row]:
    """Yield the seconds of an evaluation of 256px with each of `SETTINGS`."""
    base: float | None = None
    for name, changes in SETTINGS.items():
        row = _left_out(bench, changes) or tried(name, partial(_evaluated, bench, changes))
        if base is None:
            base = row.get("seconds")
        elif base is not None and "seconds" in row:
            row["faster"] = round(base / row["seconds"], 3)
        yield {"what": name, **row}


def _left_out(bench: Bench, changes: Mapping[str, object]) -> Row | None:
    unknown = sorted(set(changes) - set(all_keys(GenerateSettings)))
    if unknown:
        return {"skipped": f"this version has no setting {', '.join(unknown)}"}
    return {"skipped": f"{bench.left_s():.0f} s were left"} if bench.left_s() < _LEAST_S else None


def _evaluated(bench: Bench, changes: Mapping[str, object]) -> Row:
    plan = bench.plan("256px", {**ONE_BRANCH, **changes})
    first, *others = bench.evaluations(plan, count=4)
    seconds = median(others)
    peak = bench.peak_gib()
    return {"first_s": first, "seconds": seconds, **bench.tflops(plan, seconds), "peak_gib": peak}


def decoding(bench: Bench) -> Iterator[Row]:
    """Yield the seconds of decoding, and its peak beside the plan."""
    for preset in ("256px", "768px"):
        plan = bench.plan(preset)
        bench.release()
        yield tried(f"decode {preset}", partial(_stage, bench, preset, "decode", {}))
        yield {"what": f"tiles of {preset}", "latent_shape": list(plan.latent_shape)}


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
