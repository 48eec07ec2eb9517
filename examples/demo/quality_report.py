"""Report of `demo_quality.py` in words, beside the goals of the demo model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = "osora.benchmark.demo_quality/4"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that should be reached."""

    value: float
    unit: str
    at_most: bool = False
    digits: int = 1

    def judge(self, value: float) -> str:
        """Return the figure, the goal, and whether it is reached."""
        reached = value <= self.value if self.at_most else value >= self.value
        relation = "at most" if self.at_most else "at least"
        figure = f"{value:.{self.digits}f} {self.unit}".strip()
        return f"{figure} (goal: {relation} {self.value:g}, {'reached' if reached else 'missed'})"


AUTOENCODER = Goal(31.0, "dB")
SSIM = Goal(0.93, "", digits=3)
DETAIL = Goal(0.8, "", digits=2)
MEAN_READ = Goal(97.0, "%")
WORST_READ = Goal(92.0, "%")
WORST_READ_OF_HARD = Goal(88.0, "%")
BROKEN = Goal(3.3, "%", at_most=True)
FIRST_FRAME = Goal(28.0, "dB")
GENERATE = Goal(15.0, "s", at_most=True)


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
            f"              SSIM {SSIM.judge(vae['ssim'])}",
            f"              detail, of that of renders, {DETAIL.judge(vae['detail_of_renders'])}",
            f"              read from them, in %: {percent(vae['reader_accuracy'])}",
        ]
    if reader := report.get("reader"):
        lines += [f"reader        {reader['clips']} held-out renders, in %: {percent(reader['accuracy'])}"]
    for trial in report.get("prompts", []):
        combinations = "other" if trial["choosing"] else "held-out"
        lines += [
            f"prompts       {trial['mode']}: {trial['videos']} videos of {combinations} combinations "
            f"({trial['language']}), {trial['num_inference_steps']} steps "
            f"({trial['model_evaluations']} evaluations), guidance {trial['guidance_scale']:g}",
            f"              detail {trial['detail_of_renders']:.2f} of that of renders, "
            f"{trial['seconds_per_video']:.1f} s a video",
            f"              read from the videos, in %: {percent(trial['accuracy'])}",
            f"              with 95 % confidence: {_intervals(trial['intervals'])}",
            f"              mean {MEAN_READ.judge(100 * trial['accuracy']['mean'])}",
            f"              worst {WORST_READ.judge(100 * trial['worst'])}",
        ]
        lines += [
            f"              read from the middle frame alone: {percent(trial['middle_frame_accuracy'])}",
            f"              comes apart {BROKEN.judge(100 * len(trial['broken']) / trial['videos'])}",
        ]
        if trial["diversity"] is not None:
            lines += [f"              distance between seeds {trial['diversity']:.3f} of the range of pixels"]
        if hard := trial["hard"]:
            lines += [
                f"              of {hard['videos']} by night, in rain or snow: {percent(hard['accuracy'])}",
                f"              worst {WORST_READ_OF_HARD.judge(100 * hard['worst'])}",
            ]
    if pictures := report.get("pictures"):
        lines += [
            f"pictures      {pictures['pictures']} single pictures, in %: {percent(pictures['accuracy'])}",
            f"              from first frames of renders: {percent(pictures['accuracy_of_renders'])}",
            f"              detail {pictures['detail_of_renders']:.2f} of that of renders",
        ]
    for name, figures in report.get("conditions", {}).items():
        psnr = FIRST_FRAME.judge(figures["psnr_db"]) if name == "i2v_head" else f"{figures.get('psnr_db', 0):.1f} dB"
        given = f"given frames {psnr}, lowest {figures['lowest_psnr_db']:.1f}; " if "psnr_db" in figures else ""
        lines += [f"{name:<14}{figures['clips']} videos: {given}read {100 * figures['accuracy']['mean']:.1f} %"]
    for mode, run in report.get("generate", {}).items():
        stages = "  ".join(f"{name} {seconds:.1f}" for name, seconds in run["stages_s"].items())
        lines += [
            f"generate      {mode}: {GENERATE.judge(run['seconds'])} on {run['cores']} cores",
            f"              {stages}",
        ]
    return lines
