"""Predicted times beside measured and published ones, and the tables of the pages about predictions.

The efficiencies of products, attention and the autoencoder are fitted to times of an H100 in the log of `gpu.py`.
`python benchmarks/predict.py` fits the efficiencies of the reference implementation to two of its five published times,
and predicts the other three; `--tables` prints the tables.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from opensora_cli.core.device import GIB
from opensora_cli.core.formatting import duration
from opensora_cli.engine.estimate.predicted_time import TRAFFIC
from opensora_cli.engine.generate.chain import alone
from opensora_cli.engine.generate.dry_run import hardware_of_ranks
from opensora_cli.engine.generate.plan import Plan, make_plan
from opensora_cli.engine.generate.predicted import decoding, evaluation, loading, predict_time, text
from opensora_cli.engine.train.estimate import estimate_training
from opensora_cli.engine.train.plan import TrainPlan, plan_training
from opensora_cli.engine.train.predicted import predict_step
from opensora_cli.settings.hardware import GpuSettings, read_machine
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.train import load_train_settings

EVALUATIONS = 150
"""Evaluations of the reference: 50 steps with three branches of guidance each."""
LOG = Path(__file__).parent / "logs" / "gpu_h100.json"
PRESETS = ("256px", "768px")
GPUS = ("4090", "A100-80GB", "H100", "H200")
TRAINING_GPUS = ("H100", "H200")
STAGES = ("image", "stage1", "stage2")
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Published:
    """Published time of the reference implementation on H100 or H800 GPUs, in seconds."""

    resolution: str
    gpus: int
    seconds: float
    traffic_gb: float
    """GB that an evaluation moves in memory, except for products and attention. The count follows the reference: heads
    are normalized and rotated in fp32 copies, and no addition is fused with a multiplication."""


PUBLISHED = (
    Published("256px", 1, 60, 305.6),
    Published("768px", 1, 1656, 2650.2),
    Published("768px", 2, 863, 1606.6),
    Published("768px", 4, 466, 923.9),
    Published("768px", 8, 276, 582.6),
)
FITTED_TO = (PUBLISHED[0], PUBLISHED[3])
"""Pair of times for the fit, with the smallest error of the other three among all pairs: other pairs leave 15 % and
more."""


@cache
def plan_on(resolution: str, machine: str, *, ring: bool = False) -> Plan:
    """Return the plan of a preset on the hardware of `--on`. With `ring` all ranks share tokens by ring attention."""
    planned = read_machine(machine)
    count = planned.count or 1
    changes = {"parallel.gpus": count, **({"parallel.ring_degree": count} if ring else {})}
    settings = load_preset(resolution, prompt="raining, sea").replace(changes)
    return make_plan(settings, hardware=hardware_of_ranks(settings, gpu=planned.gpu), tries_device=False)


@dataclass(frozen=True)
class Measured:
    """Time that `benchmarks/gpu.py` measured on an H100."""

    resolution: str
    what: str
    seconds: float


TimeT = TypeVar("TimeT", Published, Measured)


def measured_times() -> list[Measured]:
    """Return the times of the log: evaluations, then decodes, each at 256px before 768px."""
    parts = {part["part"]: part["rows"] for part in json.loads(LOG.read_text(encoding="utf-8"))["parts"]}
    rows = {row["what"]: row for row in parts["decoding"]}
    evaluations = [Measured(preset, "evaluation", parts[preset][0]["seconds"]) for preset in PRESETS]
    return [*evaluations, *(Measured(preset, "decode", rows[f"decode {preset}"]["seconds"]) for preset in PRESETS)]


def of_ours(time: Measured, gpu: GpuSettings) -> float:
    """Return the predicted seconds of a measured time."""
    plan = plan_on(time.resolution, "1xH100")
    return (evaluation if time.what == "evaluation" else decoding)(plan, gpu).total


def measured_table(gpu: GpuSettings) -> list[str]:
    """Return measured times beside predicted ones."""
    head = _row(("on an H100", "measured", "predicted", "error"))
    rows = []
    for time in measured_times():
        predicted = of_ours(time, gpu)
        error = f"{predicted / time.seconds - 1:+.1%}"
        rows.append(_row((f"{time.what} of {time.resolution}", f"{time.seconds:.3g} s", f"{predicted:.3g} s", error)))
    return [head, _row(["---"] * 4), *rows]


def of_reference(time: Published, gpu: GpuSettings) -> float:
    """Return the predicted seconds of the reference: ring attention, all branches, and each rank decodes everything."""
    plan = plan_on(time.resolution, f"{time.gpus}xH100", ring=time.gpus > 1)
    evaluated = evaluation(plan, gpu)
    evaluated[TRAFFIC] = gpu.memory_rate.seconds(time.traffic_gb * 1e9)
    decoded = decoding(plan_on(time.resolution, "1xH100"), gpu)
    return (evaluated * EVALUATIONS + loading(plan, gpu) + text(plan, gpu) + decoded).total


def fit(
    two: Sequence[TimeT], gpu: GpuSettings, predicted: Callable[[TimeT, GpuSettings], float] = of_reference
) -> GpuSettings:
    """Return the GPU with the efficiencies of products and attention, to three digits, that predict both times exactly.

    Times are linear in the inverse of both efficiencies unless overlap hides them, so a few Newton steps suffice.
    Raises ValueError if no efficiencies between 0 and 1 fit.
    """

    def missed(inverse: Sequence[float]) -> list[float]:
        return [predicted(time, _with(gpu, inverse)) - time.seconds for time in two]

    inverse = [2.0, 2.0]
    for _ in range(8):
        now = missed(inverse)
        columns = []
        for axis in range(2):
            moved = [value + 0.01 * (axis == index) for index, value in enumerate(inverse)]
            columns.append([(after - before) / 0.01 for after, before in zip(missed(moved), now, strict=True)])
        (a, c), (b, d) = columns
        determinant = a * d - b * c
        if abs(determinant) < 1e-9:
            raise ValueError("the two times say the same")
        inverse[0] -= (d * now[0] - b * now[1]) / determinant
        inverse[1] -= (a * now[1] - c * now[0]) / determinant
        if min(inverse) < 1:
            raise ValueError("an efficiency would be over 1")
    return _with(gpu, [1 / round(1 / value, 3) for value in inverse])


def _with(gpu: GpuSettings, inverse: Sequence[float]) -> GpuSettings:
    names = ("product_efficiency", "attention_efficiency")
    return gpu.model_copy(update={name: 1 / value for name, value in zip(names, inverse, strict=True)})


def errors(gpu: GpuSettings, left_out: Sequence[Published] = ()) -> Mapping[Published, float]:
    """Return the relative errors of the predictions for the published times, without the times in `left_out`."""
    return {time: of_reference(time, gpu) / time.seconds - 1 for time in PUBLISHED if time not in left_out}


def truth_table(gpu: GpuSettings) -> list[str]:
    """Return published times beside the predictions for the reference and for our own plan of the same work."""
    two, reference = FITTED_TO, fit(FITTED_TO, gpu)
    rows = [_row(("H100 GPUs", "published", "predicted", "error", "osora, predicted")), _row(["---"] * 5)]
    for time, error in errors(reference).items():
        ours = predict_time(alone(plan_on(time.resolution, f"{time.gpus}xH100")), gpu).seconds
        shown = "fitted" if time in two else f"{error:+.1%}"
        predicted = f"{time.seconds * (1 + error):,.0f} s"
        cells = f"{time.resolution} on {time.gpus}", f"{time.seconds:,.0f} s", predicted, shown, f"{ours:,.0f} s"
        rows.append(_row(cells))
    return rows


def generation_row(resolution: str, gpu: str) -> str:
    """Return the row for a GPU: the predicted times of a preset on 1, 2, 4 and 8 of them."""
    chains = [alone(plan_on(resolution, f"{count}x{gpu}")) for count in COUNTS]
    seconds = [predict_time(chain, read_machine(gpu).gpu).seconds if chain.fits else None for chain in chains]
    return _row((gpu, *("does not fit" if each is None else duration(each) for each in seconds)))


def generation_table(resolution: str) -> list[str]:
    """Return the table of a preset."""
    head = _row(("GPU", *("1 GPU" if count == 1 else f"{count} GPUs" for count in COUNTS)))
    return [head, _row(["---"] * 5), *(generation_row(resolution, gpu) for gpu in GPUS)]


def train_plan(recipe: str, machine: str, changes: Mapping[str, object]) -> TrainPlan:
    """Return the plan of a recipe on the hardware of `--on`, without an estimate of its memory."""
    planned = read_machine(machine)
    given = {**planned.counts(()), **{key: Given(value, "--set") for key, value in changes.items()}}
    settings = load_train_settings(
        config=Path(recipe), overrides=given, environment={}, saved=None, report=lambda line: None
    )
    return plan_training(settings, overwrite=True, machine=planned)


@cache
def step_bytes(recipe: str, ranks: int, changes: tuple[tuple[str, object], ...]) -> int:
    """Return the bytes of the first rank on its GPU, equal for all GPUs with enough page-locked host memory."""
    settings = train_plan(recipe, f"{ranks}x{GPUS[-1]}", dict(changes)).settings
    return estimate_training(settings).rank.device_peak_bytes


def stage2_changes(recipe: str, ranks: int) -> dict[str, object]:
    """Return the settings for fewer GPUs than the recipe asks for."""
    if recipe != "stage2" or ranks >= 4:
        return {}
    return {"parallel.ring_degree": 2} if ranks == 2 else {"strategy": "zero3", "parallel.ring_degree": "none"}


def training_row(recipe: str, ranks: int) -> str:
    """Return the row for a step of a recipe: the memory of the first rank, and the predicted time on each GPU."""
    changes = stage2_changes(recipe, ranks)
    needed = step_bytes(recipe, ranks, tuple(changes.items()))
    seconds = []
    for name in TRAINING_GPUS:
        gpu = read_machine(name).gpu
        fits = needed <= gpu.free_bytes
        plan = train_plan(recipe, f"{ranks}x{name}", changes) if fits else None
        seconds.append("-" if plan is None else duration(predict_step(plan.settings, gpu).seconds))
    return _row((f"`{recipe}`", str(ranks), f"{needed / GIB:.1f} GiB", *seconds))


def training_table() -> list[str]:
    """Return the table of the training stages and of an adapter."""
    rows = [training_row(stage, count) for stage in STAGES for count in COUNTS]
    rows += [training_row("stage2", 64), training_row("stage1_lora_16gib", 1)]
    head = _row(("recipe", "GPUs", "memory of a GPU", *(f"a step, {gpu}" for gpu in TRAINING_GPUS)))
    return [head, _row(["---"] * 5), *rows]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="print the tables of the page")
    asked = parser.parse_args()
    h100 = read_machine("H100").gpu
    print("\n".join((*measured_table(h100), "", *truth_table(h100))))
    if asked.tables:
        for resolution in PRESETS:
            print("", *generation_table(resolution), sep="\n")
        print("", *training_table(), sep="\n")


if __name__ == "__main__":
    main()
