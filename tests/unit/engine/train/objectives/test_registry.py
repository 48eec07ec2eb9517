"""An objective is one file: nothing else of the package depends on which one a run has."""

import re
from pathlib import Path

import alternating
import tiny_training
from safetensors.torch import load_file

import opensora_cli
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.train import objectives
from opensora_cli.engine.train.plan import plan_training, with_memory
from opensora_cli.engine.train.run import train
from opensora_cli.settings import train as train_settings


def test_an_objective_of_two_adapters_that_alternate_is_one_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(Path(alternating.__file__).parent)])
    target = train_settings.TARGETS["vae"]._replace(weights_file="student.safetensors")
    monkeypatch.setitem(train_settings.TARGETS, "alternating", target)
    settings = tiny_training.vae_settings(tmp_path / "run").replace({"target": "alternating"})
    plan = with_memory(plan_training(settings), reporter=SilentReporter())
    assert (plan.parameters, plan.memory.at_peak["weights"]) == (24, 144)

    result = train(settings)
    assert (result.target, result.parameters) == ("alternating", 24)
    assert result.exports == (tmp_path / "run" / "student.safetensors",)
    assert load_file(result.exports[0]).keys() == {"student.weight", "student.bias"}
    updates = {
        name: float(load_file(result.checkpoint / f"optimizer/{name}.safetensors")[key])
        for name, key in (("moments", "step.student.bias"), ("critic_moments", "step.critic.bias"))
    }
    assert updates == {"moments": 2.0, "critic_moments": 4.0}


def test_no_module_branches_on_the_target() -> None:
    package = Path(opensora_cli.__file__).parent
    branch = re.compile(r"\.target (is|==|!=|in) |\bmatch .*\.target\b|TrainTarget|TARGETS\[")
    found = [
        (str(path.relative_to(package)), line.strip())
        for folder in ("engine/train", "engine/encode", "engine/data", "engine/mem_profile", "settings", "cli")
        for path in sorted((package / folder).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if branch.search(line)
    ]
    assert found == [("settings/train.py", "return TARGETS[self.target]")]
