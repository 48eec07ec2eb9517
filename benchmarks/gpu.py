"""Measure predicted times and memory on a GPU, in one run, the most important parts first.

    python benchmarks/gpu.py --minutes 9 --out gpu.json
    python benchmarks/gpu.py --tiny --device cpu --out gpu.json    # the same code with tiny sizes, on any machine

Weights are random and of the released sizes: neither memory nor time depends on their values. The file is written
after each figure, so that nothing is lost if the run is killed. A part that would not finish in time is skipped. The
record of a failed part has its error and its earlier figures, and the next part runs.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Row
from gpu_parts import attention, decoding, evaluation, rates, settings, streaming, training

from opensora_cli.core.device import release_memory
from opensora_cli.core.files import write_json_atomic
from opensora_cli.engine.components.hardware import versions

SCHEMA = "osora.bench.gpu/2"
_MOST_TRACE = 2000


PARTS: Mapping[str, tuple[Callable[[Bench], Iterator[Row]], float]] = {
    "rates": (rates, 15),
    "256px": (partial(evaluation, preset="256px"), 25),
    "attention": (attention, 20),
    "settings": (settings, 60),
    "768px": (partial(evaluation, preset="768px"), 90),
    "decoding": (decoding, 40),
    "streaming": (streaming, 70),
    "training": (training, 30),
}
"""Parts by name, each with the remaining seconds that it needs to begin: its expected time on an H100."""


def run_part(name: str, bench: Bench, record: dict[str, Any], write: Callable[[], None]) -> None:
    """Put the rows of a part, or its error, into its record, and call `write` after each row."""
    (measure, least_s), found = PARTS[name], list[Row]()
    record |= {"part": name, "status": "running", "rows": found}
    if bench.left_s() < least_s:
        reason = f"{max(0.0, bench.left_s()):.0f} s are left, and this part needs {least_s:g} s"
        record |= {"status": "skipped", "reason": reason}
        return
    start = time.perf_counter()
    try:
        for row in measure(bench):
            found.append(row)
            write()
            print(f"{name:<12} {json.dumps(row)}", flush=True)
        record["status"] = "done"
    except Exception as error:
        # After any error the next part still runs.
        trace = traceback.format_exc()[-_MOST_TRACE:]
        record |= {"status": "failed", "reason": f"{type(error).__name__}: {error}", "traceback": trace}
        print(f"{name:<12} failed: {error}", file=sys.stderr, flush=True)
    record["seconds"] = round(time.perf_counter() - start, 3)
    release_memory(bench.device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and write the file after each. Return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts; parts that need longer are skipped")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="may be repeated; default: all")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the figures go; default: gpu.json")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device: --device cpu --tiny tries the script", file=sys.stderr)
        return 4
    bench = Bench(device, tiny=options.tiny, minutes=options.minutes)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        "versions": versions(),
        "cuda": torch.version.cuda,
        "tiny": options.tiny,
        "minutes": options.minutes,
        "parts": [],
    }

    def write() -> None:
        document["took_s"] = round(bench.took_s(), 1)
        write_json_atomic(options.out, document)

    with torch.inference_mode(), bench:
        for name in options.part or PARTS:
            document["parts"].append({})
            run_part(name, bench, document["parts"][-1], write)
            write()
    print(f"wrote {options.out}")
    return 1 if any(part["status"] == "failed" for part in document["parts"]) else 0


if __name__ == "__main__":
    sys.exit(main())
