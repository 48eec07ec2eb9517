"""Measures what generating takes of a GPU's memory and time, with and without offload, beside what was predicted.

    python benchmarks/memory.py --out memory.json --trace trace.json.gz
    python benchmarks/memory.py --tiny --device cpu    # the same code, on any machine

Weights are random and of full size: neither memory nor time depends on their values. Each case runs two sampling steps
(or one decoding, or one encoding of a prompt). Peaks are those of torch's allocator (on a CPU: of counted tensors), and
seconds are the median of the evaluations after the first. The trace is of one evaluation with blocks on their way, and
`overlap` is the share of the copies' time in which a kernel ran too.
"""

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from opensora_cli.engine.components.autoencoders import autoencoder_on_meta
from opensora_cli.engine.components.configs import transformer_on_meta
from opensora_cli.engine.components.hardware import GIB, release_memory
from opensora_cli.engine.components.text_encoders import STREAMED_LAYERS
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate import load
from opensora_cli.engine.generate.decode import decode_latents
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset

SCHEMA = "osora.bench.memory/1"
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128}
TINY = {
    "model.hidden_size": "64",
    "model.num_heads": "2",
    "model.axes_dim": "8,12,12",
    "model.depth": "2",
    "model.depth_single_blocks": "4",
    "video.num_frames": "17",
    "video.height": "64",
    "video.width": "64",
    "vae.block_out_channels": "32,32,64,64",
}


@dataclass(frozen=True)
class Case:
    """One measurement, and what it should reach.

    Args:
        name: for the report.
        preset: of the size.
        changes: dotted settings.
        limit_gib: most memory that it may take.
        beside: the case whose time is the measure; None: itself is one.
        most_time: times as long as that.
    """

    name: str
    preset: str
    changes: dict[str, object] = field(default_factory=dict)
    limit_gib: float | None = None
    beside: str | None = None
    most_time: float | None = None


DENOISE_CASES = (
    Case("768px", "768px", {"memory.offload": "none", "memory.limit": "32GiB"}, limit_gib=32),
    Case("768px in 16 GiB", "768px", {"memory.limit": "16GiB"}, limit_gib=16, beside="768px", most_time=1.10),
    Case("256px", "256px", {"memory.offload": "none"}),
    Case("256px in 12 GiB", "256px", {"memory.limit": "12GiB"}, limit_gib=12, beside="256px", most_time=1.35),
    Case("256px in 12 GiB, 8 bits", "256px", {"memory.limit": "12GiB", "memory.fp8_storage": "true"}, limit_gib=12),
)


def plan_for(case: Case, *, device: str, tiny: bool) -> ExecutionPlan:
    """Return the plan of a case; weights need not be there."""
    changes: dict[str, object] = {
        "runtime.device": device,
        "runtime.dtype": "bfloat16",
        "sampling.num_inference_steps": 2,
        **case.changes,
    }
    if tiny:
        # No tiny model fills a limit.
        changes |= TINY | {"memory.limit": None, "memory.resident_blocks": 2 if case.beside else None}
    settings: GenerateSettings = load_preset(case.preset, prompt="raining, sea").replace(changes)
    return make_plan(settings)


@contextmanager
def measured(device: torch.device, *weights: nn.Module) -> Iterator[Callable[[], int]]:
    """Count inside the block, on a CPU with the weights that are there; yields what returns the peak in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
    else:
        with TensorBytes() as counter:
            for module in weights:
                counter.add(module)
            yield lambda: counter.peak_bytes


def synchronized(device: torch.device) -> float:
    """Return the time when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fill(module: nn.Module, *, device: torch.device, place: torch.device, dtype: torch.dtype) -> None:
    """Give a module on the meta device random weights at `place`, drawn on `device`."""
    generator = torch.Generator(device).manual_seed(0)
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None and weight.is_meta:
                values = torch.empty(weight.shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
                part._parameters[name] = nn.Parameter(values.to(place), requires_grad=False)
    module.eval()


def make_embeds(plan: ExecutionPlan) -> PromptEmbeds:
    """Return random embeddings of two prompts."""
    text, model, hardware = plan.settings.text, plan.settings.model, plan.hardware
    options: dict[str, Any] = {"device": hardware.device, "dtype": hardware.dtype}
    return PromptEmbeds(
        torch.randn(2, text.t5_max_length, model.context_in_dim, **options),
        torch.randn(2, model.vec_in_dim, **options),
    )


def denoise(plan: ExecutionPlan, transformer: nn.Module) -> tuple[list[float], int]:
    """Return the seconds of each evaluation, and the peak in bytes."""
    device, times = plan.hardware.device, []
    stacks = [transformer.get_submodule(each.module_path) for each in repeated_blocks(transformer.config)]
    on_device = [each for each in transformer.children() if each not in stacks or plan.offload.resident_blocks is None]
    with measured(device, *on_device) as peak, ExitStack() as stack:
        for child in on_device:
            child.to(device)
        transformer.set_sequence_chunk(plan.offload.chunk_tokens)
        if plan.offload.resident_blocks is not None:
            stack.enter_context(load.streamed_blocks(plan, transformer))
        embeds = make_embeds(plan)
        last = synchronized(device)

        def note_time() -> None:
            nonlocal last
            now = synchronized(device)
            times.append(now - last)
            last = now

        sample_latents(plan, transformer, [embeds], None, seeds=[0], on_evaluation=note_time)
        return times, peak()


def measure_denoise(case: Case, plan: ExecutionPlan, trace: Path | None) -> dict[str, Any]:
    """Return the report of one case, and write the trace of one more step, if wanted."""
    device, host = plan.hardware.device, torch.device("cpu")
    transformer = transformer_on_meta(plan.settings.model)
    fill(transformer, device=device, place=host, dtype=plan.hardware.dtype)
    if plan.offload.fp8_storage:
        for stack in repeated_blocks(transformer.config):
            for block in transformer.get_submodule(stack.module_path).children():
                load.store_in_fp8(block)
    times, peak = denoise(plan, transformer)
    report = reported(plan, "denoise", peak) | {"case": case.name, "evaluation_s": statistics.median(times[1:])}
    if trace is not None:
        report["overlap"] = trace_overlap(plan, transformer, trace)
    return report


def trace_overlap(plan: ExecutionPlan, transformer: nn.Module, path: Path) -> float:
    """Profile a run, write the trace, and return the share of the copies' time in which a kernel ran."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        denoise(plan, transformer)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(plain))
        path.write_bytes(gzip.compress(plain.read_bytes()))
        events = json.loads(plain.read_text())["traceEvents"]
    copies = [event for event in events if "Memcpy HtoD" in event.get("name", "") and event["dur"] > 100]
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel")
    covered = sum(_covered(event["ts"], event["ts"] + event["dur"], kernels) for event in copies)
    return covered / max(sum(event["dur"] for event in copies), 1)


def _covered(start: float, end: float, spans: list[tuple[float, float]]) -> float:
    """Return how much of start..end lies in `spans`, which are sorted and may overlap."""
    covered, reached = 0.0, start
    for first, last in spans:
        first, last = max(first, reached), min(last, end)
        if last > first:
            covered += last - first
            reached = last
    return covered


def measure_decode(plan: ExecutionPlan, *, name: str) -> dict[str, Any]:
    """Return the report of decoding one sample."""
    vae = autoencoder_on_meta(plan.settings.vae)
    device = plan.hardware.device
    fill(vae, device=device, place=torch.device("cpu"), dtype=plan.hardware.dtype)
    with measured(device, vae) as peak:
        vae.to(device)
        latents = torch.randn(1, *plan.latent_shape)
        start = synchronized(device)
        for pieces_THWC in decode_latents(plan, vae, latents):
            del pieces_THWC
        seconds = synchronized(device) - start
        return reported(plan, "decode", peak()) | {"case": name, "seconds": seconds}


def measure_text(device: torch.device, *, tiny: bool, streamed: bool) -> dict[str, Any]:
    """Return the report of T5-XXL reading two prompts."""
    sizes = T5_XXL | ({"num_layers": 3, "d_model": 64, "d_ff": 128, "num_heads": 4} if tiny else {})
    with torch.device("meta"):
        model = transformers.T5EncoderModel(transformers.T5Config(**sizes, feed_forward_proj="gated-gelu"))
    fill(model, device=device, place=torch.device("cpu"), dtype=torch.bfloat16)
    model.encoder.embed_tokens = model.shared
    blocks = model.encoder.block
    on_device = [model.shared, model.encoder.final_layer_norm] if streamed else [model]
    with measured(device, *on_device) as peak, ExitStack() as stack:
        for part in on_device:
            part.to(device)
        if streamed:
            stack.enter_context(stream_blocks([blocks], device=device, resident=STREAMED_LAYERS, source="mapped"))
        start = synchronized(device)
        model(input_ids=torch.zeros(2, 512, dtype=torch.long, device=device))
        seconds = synchronized(device) - start
        name = "T5-XXL layer by layer" if streamed else "T5-XXL"
        return {"case": name, "stage": "text", "peak_gib": peak() / GIB, "seconds": seconds}


def reported(plan: ExecutionPlan, stage: str, peak: int) -> dict[str, Any]:
    """Return what was measured of a stage beside what was predicted."""
    predicted = next(each.total_bytes for each in plan.stages if each.name == stage)
    return {
        "stage": stage,
        "offload": plan.offload.lines(),
        "peak_gib": peak / GIB,
        "predicted_gib": predicted / GIB,
        "predicted_over_measured": predicted / peak,
    }


def judge(cases: tuple[Case, ...], reports: list[dict[str, Any]]) -> None:
    """Add to each report whether it is within its limits."""
    by_name = {report["case"]: report for report in reports}
    for case in cases:
        report = by_name[case.name]
        if case.beside is not None:
            report["time_ratio"] = report["evaluation_s"] / by_name[case.beside]["evaluation_s"]
        too_large = case.limit_gib is not None and report["peak_gib"] > case.limit_gib
        too_slow = case.most_time is not None and report["time_ratio"] > case.most_time
        report["limit_gib"], report["most_time"] = case.limit_gib, case.most_time
        report["reached"] = not too_large and not too_slow


def main() -> None:
    """Run all cases, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    parser.add_argument("--out", type=Path, help="also write the report here")
    parser.add_argument("--trace", type=Path, help="write a trace of the case '768px in 16 GiB' here, as .json.gz")
    arguments = parser.parse_args()
    reports: list[dict[str, Any]] = []
    with torch.inference_mode():
        for case in DENOISE_CASES:
            plan = plan_for(case, device=arguments.device, tiny=arguments.tiny)
            trace = arguments.trace if case.name == "768px in 16 GiB" else None
            reports.append(measure_denoise(case, plan, trace))
            print(json.dumps(reports[-1]), flush=True)
            release_memory(plan.hardware.device)
        judge(DENOISE_CASES, reports)
        decoding = Case("decode 768px", "768px")
        for name, limit in (("decode 768px", None), ("decode 768px in 4 GiB", "4GiB")):
            limited = Case(name, decoding.preset, {"memory.limit": limit})
            reports.append(measure_decode(plan_for(limited, device=arguments.device, tiny=arguments.tiny), name=name))
            print(json.dumps(reports[-1]), flush=True)
        for streamed in (False, True):
            reports.append(measure_text(torch.device(arguments.device), tiny=arguments.tiny, streamed=streamed))
            print(json.dumps(reports[-1]), flush=True)
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    document = {"schema": SCHEMA, "device": name, "torch": torch.__version__, "tiny": arguments.tiny, "cases": reports}
    text = json.dumps(document, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
