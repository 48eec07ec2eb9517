"""What `demo_quality.py` measured, in words, beside what the demo model should reach."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = "osora.benchmark.demo_quality/1"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that should be reached."""

    value: float
    unit: str
    at_most: bool = False

    def judge(self, value: float) -> str:
        """Return the figure, the goal, and whether it is reached."""
        reached = value <= self.value if self.at_most else value >= self.value
        relation = "at most" if self.at_most else "at least"
        return f"{value:.1f} {self.unit} (goal: {relation} {self.value:g}, {'reached' if reached else 'missed'})"


AUTOENCODER = Goal(28.0, "dB")
MEAN_READ = Goal(90.0, "%")
WORST_READ = Goal(75.0, "%")
FIRST_FRAME = Goal(26.0, "dB")
GENERATE = Goal(60.0, "s", at_most=True)


def percent(shares: Mapping[str, float]) -> str:
    """Return shares, 0 to 1, as named percentages."""
    return "  ".join(f"{name} {100 * share:.1f}" for name, share in shares.items())


def _intervals(intervals: Mapping[str, tuple[float, float]]) -> str:
    return "  ".join(f"{name} {100 * low:.0f}-{100 * high:.0f}" for name, (low, high) in intervals.items())


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines of a report, of the parts that it has."""
    lines = []
    if vae := report.get("vae"):
        weathers = "  ".join(f"{name} {value:.1f}" for name, value in vae["psnr_db_by_weather"].items())
        lines += [
            f"autoencoder   {vae['clips']} held-out clips: PSNR {AUTOENCODER.judge(vae['psnr_db'])}",
            f"              {weathers}  lowest {vae['lowest_psnr_db']:.1f}",
            f"              SSIM {vae['ssim']:.3f}, detail {vae['detail_of_renders']:.2f} of that of renders",
            f"              read from them, in %: {percent(vae['reader_accuracy'])}",
        ]
    if reader := report.get("reader"):
        lines += [f"reader        {reader['clips']} held-out renders, in %: {percent(reader['accuracy'])}"]
    for trial in report.get("prompts", []):
        lines += [
            f"prompts       {trial['videos']} held-out combinations, {trial['num_inference_steps']} steps "
            f"({trial['model_evaluations']} evaluations), guidance {trial['guidance_scale']:g}",
            f"              detail {trial['detail_of_renders']:.2f} of that of renders",
            f"              read from the videos, in %: {percent(trial['accuracy'])}",
            f"              with 95 % confidence: {_intervals(trial['intervals'])}",
            f"              mean {MEAN_READ.judge(100 * trial['accuracy']['mean'])}",
            f"              worst {WORST_READ.judge(100 * trial['worst'])}",
        ]
    if first := report.get("first_frame"):
        lines += [
            f"first frame   {first['clips']} videos: PSNR {FIRST_FRAME.judge(first['psnr_db'])}",
            f"              lowest {first['lowest_psnr_db']:.1f}",
        ]
    if run := report.get("generate"):
        stages = "  ".join(f"{name} {seconds:.1f}" for name, seconds in run["stages_s"].items())
        lines += [
            f"generate      {GENERATE.judge(run['seconds'])} on {run['cores']} cores",
            f"              {stages}",
        ]
    return lines
