"""Which presets run here, and in how much memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil

from opensora_cli.engine.components.hardware import GIB
from opensora_cli.engine.env_check.findings import Check, Finding
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.settings.files import list_presets
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetNeeds:
    """What a preset of `osora generate` takes on this machine."""

    name: str
    video: str
    device: str
    dtype: str
    stage: str
    """The stage that takes most."""
    needed_bytes: int
    free_bytes: int
    offload: str
    """What waits outside the device, so that it needs no more."""
    has_weights: bool

    @property
    def fits(self) -> bool:
        """Whether as much memory is free."""
        return self.needed_bytes <= self.free_bytes

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {**asdict(self), "fits": self.fits}


def preset_here(name: str, environment: Mapping[str, str]) -> GenerateSettings:
    """Return the settings of a preset, with the weights folder that the environment names."""
    settings = load_preset(name, prompt="any")
    folder = environment.get("OSORA_WEIGHTS") or environment.get("OSORA_RUNTIME__WEIGHTS")
    return settings.replace({"runtime.weights": folder}) if folder else settings


def read_presets(environment: Mapping[str, str]) -> tuple[PresetNeeds, ...]:
    """Return the needs of all presets, as plans count them; no weight is read."""
    return tuple(_needs(name, preset_here(name, environment)) for name in list_presets("generate"))


def _needs(name: str, settings: GenerateSettings) -> PresetNeeds:
    # The one place that asks for estimates: a plan's stages.
    plan = make_plan(settings)
    worst = max(plan.stages, key=lambda stage: stage.total_bytes)
    return PresetNeeds(
        name=name,
        video=f"{plan.width}x{plan.height}, {settings.video.num_frames} frames",
        device=str(plan.hardware.device),
        dtype=str(plan.hardware.dtype).removeprefix("torch."),
        stage=worst.name,
        needed_bytes=worst.total_bytes,
        free_bytes=plan.budget_bytes,
        offload=plan.offload.mode.value,
        has_weights=not plan.weights.missing,
    )


def check_presets(presets: Sequence[PresetNeeds]) -> Iterator[Finding]:
    """Judge whether anything at all runs."""
    check = Check("presets")
    fitting = [preset.name for preset in presets if preset.fits]
    if not fitting:
        yield check.problem(
            "no preset fits into the memory that is free",
            why=f"the smallest needs {min(preset.needed_bytes for preset in presets) / GIB:.2f} GiB",
            mend="close other programs, or use a machine with more memory",
        )
        return
    yield check.ok(f"memory suffices for {', '.join(fitting)}")


def table_lines(presets: Sequence[PresetNeeds]) -> list[str]:
    """Return the table for people."""
    if not presets:
        return []
    rows = [("preset", "video", "device", "needs", "free", "fits", "offload", "weights")]
    for preset in presets:
        rows.append(
            (
                preset.name,
                preset.video,
                f"{preset.device} {preset.dtype}",
                f"{_up(preset.needed_bytes)} GiB ({preset.stage})",
                f"{preset.free_bytes / GIB:.1f} GiB",
                "yes" if preset.fits else "no",
                preset.offload,
                "here" if preset.has_weights else "missing",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _up(count: int) -> str:
    """Return GiB, rounded so that no need looks smaller than it is."""
    return f"{ceil(count / GIB * 100) / 100:.2f}"
