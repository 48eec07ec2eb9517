"""Whether a setting took effect on what ran, and where it did not, why."""

from collections.abc import Callable, Mapping
from typing import Any

from opensora_cli.engine.components.parallelize import describe_mesh
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.settings.bench_generate import Changes
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.used import used_settings

Ran = Mapping[str, str]


def what_ran(plan: ExecutionPlan) -> Ran:
    """Return what a run was computed with, by the name of each choice that changes no more than rounding."""
    return {
        "attention": "none" if plan.attention is None else plan.attention.backend,
        "blocks": "compiled" if plan.settings.compile else "not compiled",
        "dtype": plan.hardware.dtype_name,
        "offload": "; ".join(plan.offload.lines()) or "none",
        "devices": describe_mesh(plan.mesh) if plan.mesh.size > 1 else str(plan.hardware.device),
        "exchange": "none" if plan.planned_exchange is None else plan.planned_exchange.line(),
        "threads": "none" if plan.threads is None else str(plan.threads.count),
    }


_BY_KEY: Mapping[str, Callable[[ExecutionPlan, Ran], str]] = {
    "runtime.attention": lambda plan, ran: f"the attention is {ran['attention']} in both",
    "runtime.dtype": lambda plan, ran: f"both compute in {ran['dtype']}",
    "runtime.threads": lambda plan, ran: f"both compute with {ran['threads']} threads",
    "sampling.step_cache": lambda plan, ran: "no step was spared by its cache",
    "precision.tf32": lambda plan, ran: f"no product ran in TF32 on {plan.hardware.device}",
    "memory": lambda plan, ran: f"offload is {ran['offload']} in both",
}
"""What can be said of a key, or of a section, that changed nothing."""


def why_without_effect(changes: Changes, plan: ExecutionPlan, exact: ExecutionPlan) -> str | None:
    """Return why `changes`, with which a video is the same bit for bit after as many evaluations, changed nothing.

    None: what computed it is another, which is an effect.
    """
    ran = what_ran(plan)
    if ran != what_ran(exact):
        return None
    return "; ".join(dict.fromkeys(_why(key, plan, exact, ran) for key in changes))


def _why(key: str, plan: ExecutionPlan, exact: ExecutionPlan, ran: Ran) -> str:
    value, before = _value(plan.settings, key), _value(exact.settings, key)
    if value == before:
        return f"{key} is {'none' if value is None else value} in the exact run, too"
    if _is_unused(key, plan.settings):
        return f"{key} takes no part in such a run"
    say = _BY_KEY.get(key) or _BY_KEY.get(key.partition(".")[0])
    return f"{key} changed nothing" if say is None else say(plan, ran)


def _value(settings: GenerateSettings, key: str) -> object:
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _is_unused(key: str, settings: GenerateSettings) -> bool:
    place: Any = used_settings(settings)
    for name in key.split("."):
        if not isinstance(place, dict) or name not in place:
            # What depends on the machine is in no list of what took part.
            return key.partition(".")[0] in ("sampling", "vae")
        place = place[name]
    return False
