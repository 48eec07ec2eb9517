"""`osora env-check`: exit codes, JSON, files with faults, shell lines for eval, reports without secrets."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opensora_cli.core import device_facts
from opensora_cli.core.device_facts import DriverFacts
from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check import machine

SECRETS = {
    "HF_TOKEN": "hf_OpenSesameOpenSesame",
    "OSORA_WEIGHTS": "/home/lovelace/projects/engine/weights",
    "HF_ENDPOINT": "https://lovelace:opensesame@hub.analytical.example",
    "NCCL_DEBUG": "/home/lovelace/opensesame",
}


@pytest.fixture(autouse=True)
def _a_quiet_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in filter(is_relevant, list(os.environ)):
        monkeypatch.delenv(name)


@pytest.mark.slow
def test_every_check_runs_on_this_machine(run) -> None:
    code, out, err = run("env-check", "--timeout", "120", "--quiet")
    assert (code, err) == (0, "")
    checks = [line.split()[0] for line in out.partition("\n\n")[0].splitlines() if line[0] != " "]
    assert "all-reduce  ok       gloo over 2 processes: 4 MiB in " in out
    assert set(checks) == {
        "python", "torch", "cards", "attention", "video", "memory", "disk", "limits", "environment", "all-reduce",
    }  # fmt: skip
    assert "could not be checked" not in out


def test_json_has_findings_and_variables_without_secrets(monkeypatch: pytest.MonkeyPatch, run) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])
    monkeypatch.setenv("NCCL_TREE_THRESHOLD", "0")
    code, out, err = run("env-check", "--no-all-reduce", "--json", "-q")
    document = json.loads(out)
    assert (code, err) == (0, "")  # a warning stops nothing
    assert (document["schema"], document["fine"]) == ("osora.env-check/3", True)
    assert document["environment"] == {"HF_TOKEN": "<hidden>", "NCCL_TREE_THRESHOLD": "0"}
    (finding,) = [finding for finding in document["findings"] if finding["check"] == "environment"]
    assert finding.keys() == {"check", "severity", "message", "why", "fix", "variable", "file", "line"}
    assert (finding["severity"], finding["variable"]) == ("warning", "NCCL_TREE_THRESHOLD")


def test_a_problem_exits_with_4(monkeypatch: pytest.MonkeyPatch, run) -> None:
    monkeypatch.setenv("OSORA_SAMPLING__SEDE", "1")
    code, out, err = run("env-check", "--no-all-reduce", "--quiet")
    assert code == 4
    assert "environment problem  OSORA_SAMPLING__SEDE is not a setting" in out
    assert err.startswith("error: 1 problem stops a run")


def test_a_variable_with_which_torch_cannot_be_imported_is_one_line() -> None:
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "loud"}
    command = [sys.executable, "-m", "opensora_cli", "env-check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("error: torch cannot be imported: The value of TORCH_DISTRIBUTED_DEBUG must be")


def test_a_dockerfile_with_faults(run) -> None:
    Path("Dockerfile").write_text(
        "FROM python:3.12\n"
        "ENV PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true \\\n"
        "    NCCL_P2P_DISABLE=1\n"
        "ENV OMP_NUM_THREADS 0\n",
        encoding="utf-8",
    )
    code, out, _ = run("env-check", "Dockerfile", "--no-all-reduce", "--json", "-q")
    assert code == 4
    found = [finding for finding in json.loads(out)["findings"] if finding["file"]]
    assert [(finding["line"], finding["severity"], finding["variable"]) for finding in found] == [
        (2, "problem", "PYTORCH_CUDA_ALLOC_CONF"),
        (3, "warning", "NCCL_P2P_DISABLE"),
        (4, "warning", "OMP_NUM_THREADS"),
    ]


@pytest.mark.parametrize(
    ("profile", "form"), [("local", 'eval "$({})"'), ("cloud", "eval $({})"), ("cluster", 'eval "$({})"')]
)
def test_export_goes_through_eval(profile: str, form: str, run) -> None:
    code, out, err = run("env-check", "--profile", profile, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["schema"] == "osora.env-profile/2"
    assert all(item["why"] for item in document["variables"])
    command = f"cat {shlex.quote(str(Path('lines.sh').absolute()))}"
    code, out, _ = run("env-check", "--profile", profile, "--export")
    Path("lines.sh").write_text(out, encoding="utf-8")
    script = f"set -eu; {form.format(command)}; env"
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
    )
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert {item["name"]: item["value"] for item in document["variables"]}.items() <= variables.items()


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["lines", "json"])
def test_a_bug_report_hides_secrets(form: list[str], monkeypatch: pytest.MonkeyPatch, run) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/lovelace")
    monkeypatch.setenv("LOGNAME", "lovelace")
    monkeypatch.setattr("socket.gethostname", lambda: "analytical")
    Path("lovelace.sh").write_text("export NCCL_TIMEOUT=5\n", encoding="utf-8")
    path = str(Path("lovelace.sh").absolute())
    code, out, _ = run("env-check", path, "--no-all-reduce", "--bug-report", "-q", *form)
    assert code == 0
    for secret in ("esame", "lovelace", "analytical", str(Path.cwd())):
        assert secret.lower() not in out.lower()
    assert "<hidden>" in out
    assert "NCCL_TIMEOUT=5" in out


def test_a_check_that_breaks_hides_no_other(monkeypatch: pytest.MonkeyPatch, run) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("NVML: driver/library version mismatch")

    for module in (machine, device_facts):
        for name in vars(module):
            if (name.startswith("read_") and name != "read_torch") or name == "pick_hardware":
                monkeypatch.setattr(module, name, broken)
    code, out, _ = run("env-check", "--no-all-reduce", "-q")
    assert code == 0
    broken_checks = {line.split()[0] for line in out.splitlines() if "could not be checked: NVML: driver/lib" in line}
    # Variables are compared with the libraries and GPUs of a build of torch for CUDA, and with nothing of one for CPUs.
    assert broken_checks - {"environment"} == {
        "torch", "cards", "links", "attention", "memory", "disk",
    }  # fmt: skip
    if torch.version.cuda is None:
        assert "environment ok       nothing wrong with 0 variables that matter here" in out.splitlines()


def test_a_cpu_build_beside_a_gpu_is_a_problem(monkeypatch: pytest.MonkeyPatch, run) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    smi = Path("nvidia-smi")
    smi.write_text(f"#!{sys.executable}\nprint('580.95.05, NVIDIA H100 80GB HBM3')\n", encoding="utf-8")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(Path.cwd()), prepend=os.pathsep)
    assert device_facts.read_driver() == DriverFacts(version="580.95.05", gpus=("NVIDIA H100 80GB HBM3",))
    code, out, _ = run("env-check", "--no-all-reduce", "-q")
    assert code == 4
    assert "is a build for the CPU, and here is NVIDIA H100 80GB HBM3" in out
    smi.write_text(f"#!{sys.executable}\nraise SystemExit('Driver/library version mismatch')\n", encoding="utf-8")
    assert device_facts.read_driver() == DriverFacts(failure="Driver/library version mismatch")
    smi.write_text(f"#!{sys.executable}\nraise SystemExit('No devices were found')\n", encoding="utf-8")
    assert device_facts.read_driver() == DriverFacts()
