"""Compares the strategies of training: what each rank holds, and what all of them send.

    python benchmarks/train_strategies.py --out train_strategies.json

Four processes of one machine train the same small transformer on the same eight micro-batches by each strategy, and
talk over gloo. Nothing is timed: bytes are counted, and are the same on every machine. What an update sends is counted
as its collectives pass, and compared with the formulas in `wire_formulas.py`, which hold for any size. The
table goes to stdout as Markdown.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from wire_formulas import StepSizes, update_bytes

from opensora_cli.engine.bench_comm.counting import counted_bytes
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.parallelize import local
from opensora_cli.engine.train.ranks import mesh_shape, open_distribution
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.strategy import Strategy, TrainParallelSettings

SCHEMA = "osora.bench.train-strategies/1"
RANKS = 4
MICRO_BATCHES = 8
CONFIG = MMDiTConfig(
    in_channels=16,
    vec_in_dim=32,
    context_in_dim=64,
    hidden_size=128,
    num_heads=8,
    mlp_ratio=4.0,
    depth=2,
    depth_single_blocks=4,
    axes_dim=(4, 6, 6),
)
SIZES = StepSizes(config=CONFIG, batch=1, text_tokens=16, latent_tokens=48, itemsize=4)


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        strategy: the setting.
        degrees: the settings `parallel.*`, without the ending `_degree`.
        split: what ranks divide between them.
        collectives: how they come together.
    """

    strategy: Strategy
    degrees: dict[str, int]
    split: str
    collectives: str

    @property
    def parallel(self) -> TrainParallelSettings:
        """The settings."""
        degrees = {f"{name}_degree": degree for name, degree in self.degrees.items()}
        return TrainParallelSettings.model_validate({"gpus": RANKS, **degrees})

    def __str__(self) -> str:
        """Return it as a user sets it."""
        return " ".join([f"`{self.strategy}`", *(f"{name}={degree}" for name, degree in self.degrees.items())])


_ZERO = "all-gather of weights, reduce-scatter of gradients"
CASES = (
    Case(Strategy.DDP, {}, "batch", "all-reduce of gradients"),
    Case(Strategy.ZERO1, {}, "batch, moments, weights between updates", f"{_ZERO}, each once an update"),
    Case(Strategy.ZERO2, {}, "the same, gradients", f"{_ZERO} of each micro-batch"),
    Case(Strategy.ZERO3, {}, "the same, weights of all blocks but one", f"{_ZERO}; weights forward and backward"),
    Case(
        Strategy.ZERO3, {"dp_replicate": 2}, "as zero3 between 2 ranks", "as zero3, all-reduce of gradients between 2"
    ),
    Case(Strategy.HYBRID, {"tensor_parallel": 2}, "as zero3; heads, features", "as zero3, all-reduces of activations"),
    Case(Strategy.HYBRID, {"ulysses": 2}, "as zero3; tokens", "as zero3, all-to-all of heads and tokens"),
    Case(Strategy.HYBRID, {"ring": 2}, "as zero3; tokens", "as zero3, keys and values round a ring"),
    Case(
        Strategy.HYBRID,
        {"tensor_parallel": 2, "ulysses": 2},
        "as zero3; tokens, heads, features",
        "as zero3, all-to-all, all-reduces of activations",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank holds at the end of an update, held at most within one, and sent for it."""

    weights: int
    gradients: int
    moments: int
    peak: int
    sent: int


def main() -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    out: Path | None = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(folder,), nprocs=RANKS)
        of_ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    rows = [_row(case, [each[index] for each in of_ranks]) for index, case in enumerate(CASES)]
    print(_table(rows))
    if out is not None:
        report = {
            "schema": SCHEMA,
            "ranks": RANKS,
            "micro_batches": MICRO_BATCHES,
            "torch": torch.__version__,
            "sizes": asdict(SIZES),
            "weight_bytes": sum(weight.nbytes for weight in _transformer().parameters()),
            "rows": rows,
        }
        out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [row["strategy"] for row in rows if row["sent_bytes"] != sum(row["sent_bytes_by_formula"].values())]
    if wrong:
        sys.exit(f"formulas say otherwise of {', '.join(wrong)}")


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    measured = [asdict(_measure(case)) for case in CASES]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _measure(case: Case) -> Measured:
    # From the beginning: memory that is made for the first update serves the later ones.
    with TensorBytes(follow_sizes=True) as held:
        distribution = open_distribution(case.strategy, case.parallel, device=torch.device("cpu"), dtype=None)
        model = _transformer()
        forward = distribution.shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        # In its second update DDP agrees on the order of gradients.
        for _ in range(2):
            _find_gradients(distribution, model, forward)
            optimizer.step()
            optimizer.zero_grad()
        held.reset_peak()
        with counted_bytes() as sent:
            _find_gradients(distribution, model, forward)
        optimizer.step()
    gradients = [local(weight.grad) for weight in model.parameters() if weight.grad is not None]
    moments = [local(state[name]) for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return Measured(
        weights=_bytes([local(weight) for weight in model.parameters()]),
        gradients=_bytes(gradients),
        moments=_bytes(moments),
        peak=held.peak_bytes,
        sent=sent.num_bytes,
    )


def _find_gradients(distribution: Distribution, model: MMDiT, forward: Any) -> None:
    own = range(distribution.data_rank, MICRO_BATCHES, distribution.data_ranks)
    for number in own:
        with distribution.accumulating(last=number == own[-1]):
            velocity: Tensor = forward(_latents(number), **_conditions(number))
            (velocity.square().mean() / len(own)).backward()  # type: ignore[no-untyped-call]
    distribution.clip_grad_norm(model, 1.0)


def _transformer() -> MMDiT:
    torch.manual_seed(0)
    model = MMDiT(CONFIG)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.05)
    return model


def _latents(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SIZES.batch, SIZES.latent_tokens, CONFIG.in_channels, generator=generator)


def _conditions(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = SIZES.latent_tokens
    return {
        "position_ids_BN3": torch.arange(tokens)[None, :, None].expand(1, tokens, 3),
        "timesteps_B": torch.rand(SIZES.batch, generator=generator),
        "prompt_embeds_BLC": torch.randn(SIZES.batch, SIZES.text_tokens, CONFIG.context_in_dim, generator=generator),
        "pooled_prompt_embeds_BV": torch.randn(SIZES.batch, CONFIG.vec_in_dim, generator=generator),
        "conditioning_BNK": torch.randn(SIZES.batch, tokens, CONFIG.conditioning_channels, generator=generator),
    }


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _row(case: Case, of_ranks: list[dict[str, int]]) -> dict[str, Any]:
    shape = mesh_shape(case.strategy, case.parallel)
    return {
        "strategy": str(case).replace("`", ""),
        "split": case.split,
        "collectives": case.collectives,
        **{
            f"{name}_bytes": max(each[name] for each in of_ranks)
            for name in ("weights", "gradients", "moments", "peak")
        },
        "sent_bytes": sum(each["sent"] for each in of_ranks),
        "sent_bytes_by_formula": asdict(update_bytes(case.strategy, shape, SIZES, micro_batches=MICRO_BATCHES)),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| strategy on 4 ranks | split | collectives | weights | gradients | moments | peak | sent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, *degrees = row["strategy"].split(" ")
        figures = (row[f"{key}_bytes"] / 2**20 for key in ("weights", "gradients", "moments", "peak", "sent"))
        cells = [
            " ".join([f"`{name}`", *degrees]),
            row["split"],
            row["collectives"],
            *(f"{mib:.1f}" for mib in figures),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "MiB of the rank that has most; sent: by all ranks for one update."])


if __name__ == "__main__":
    main()
