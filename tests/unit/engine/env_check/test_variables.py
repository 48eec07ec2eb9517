"""Each rule for environment variables, on a machine that has nothing wrong but the variable, and in files."""

import sys

import pytest

from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check import variables as rules
from opensora_cli.engine.env_check.report import PROFILES, Severity
from opensora_cli.engine.env_check.variables import Surroundings, lint_file, lint_variables

SERVER = Surroundings(
    uses_cuda=True,
    num_gpus=8,
    cores=64,
    has_nvlink=True,
    interfaces=("lo", "eth0", "eth1", "docker0"),
    infiniband=("mlx5_0", "mlx5_1"),
)
WARNING, PROBLEM, NOTE = Severity.WARNING, Severity.PROBLEM, Severity.NOTE


@pytest.fixture(autouse=True)
def torch_of_this_process(monkeypatch):
    """Ask the torch of this process. The test of the command asks that of another, which takes seconds to start."""

    def errors(code, *arguments, loggers=""):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["-c", *arguments])
            try:
                exec(code, {})
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return ""

    monkeypatch.setattr(rules, "_errors", errors)


@pytest.mark.parametrize(
    ("variables", "variable", "severity"),
    [
        (
            dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"),
            "PYTORCH_CUDA_ALLOC_CONF",
            WARNING,
        ),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:19"}, "PYTORCH_ALLOC_CONF", PROBLEM),
        ({"CUDA_MEMORY_FRACTION": "0.9"}, "CUDA_MEMORY_FRACTION", WARNING),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE", WARNING),
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE", WARNING),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "NCCL_ASYNC_ERROR_HANDLING", WARNING),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", WARNING),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "TORCH_DISTRIBUTED_DEBUG", WARNING),
        ({"TORCH_DISTRIBUTED_DEBUG": "1"}, "TORCH_DISTRIBUTED_DEBUG", PROBLEM),
        ({"TORCH_DISTRIBUTED_DEBUG": ""}, "TORCH_DISTRIBUTED_DEBUG", PROBLEM),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "NCCL_SOCKET_IFNAME", PROBLEM),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME", PROBLEM),
        ({"NCCL_SOCKET_IFNAME": "^lo,eth,docker"}, "NCCL_SOCKET_IFNAME", PROBLEM),
        ({"NCCL_SOCKET_IFNAME": "^=lo,eth0,eth1,docker0"}, "NCCL_SOCKET_IFNAME", PROBLEM),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME", PROBLEM),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS", WARNING),
        ({"OMP_NUM_THREADS": "auto"}, "OMP_NUM_THREADS", WARNING),
        ({"OMP_NUM_THREADS": "65"}, "OMP_NUM_THREADS", WARNING),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"CUDA_VISIBLE_DEVICES": "cuda:0"}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"CUDA_VISIBLE_DEVICES": "0,1,0"}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"CUDA_VISIBLE_DEVICES": "0,GPU-12ab"}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE", NOTE),
        ({"OSORA_SAMPLING__SEDE": "1"}, "OSORA_SAMPLING__SEDE", PROBLEM),
    ],
    ids=str,
)  # fmt: skip
def test_a_fault_gives_one_finding_with_reason_and_fix(variables, variable, severity):
    (finding,) = lint_variables(variables, SERVER)
    assert (finding.variable, finding.severity) == (variable, severity)
    assert finding.why
    assert finding.fix or severity is NOTE


def test_an_assertion_of_torch_is_shown_as_the_form_that_it_wants(monkeypatch):
    said = "RuntimeError: key_value INTERNAL ASSERT FAILED at allocator.h:1\n"
    monkeypatch.setattr(rules, "_errors", lambda *given: said)
    fault = rules.allocator_fault("backend=native")
    assert fault == "'backend=native' is not of the form name:value,name:value"


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0", "NCCL_P2P_DISABLE": "0", "NCCL_IB_DISABLE": "0"},
        {"NCCL_SOCKET_IFNAME": "=eth0,eth1"},
        {"NCCL_SOCKET_IFNAME": "^=eth0,lo,docker0"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"OMP_NUM_THREADS": "8,2"},
        {"CUDA_VISIBLE_DEVICES": "3,1"},
        {"OSORA_WEIGHTS": "/weights", "OSORA_SAMPLING__SEED": "1", "OSORA_LOOP__STEPS": "10"},
    ],
    ids=str,
)  # fmt: skip
def test_right_values_give_no_finding(variables):
    assert lint_variables(variables, SERVER) == []


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.profile)
def test_recommended_variables_pass_the_rules(profile):
    variables = {item.name: item.value for item in profile.variables}
    assert variables
    assert lint_variables(variables, SERVER) == []
    assert all(map(is_relevant, variables))


@pytest.fixture
def lint(tmp_path):
    def lint(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return lint_file(tmp_path / name)

    return lint


def test_env_and_arg_count(lint):
    text = """\
# syntax=docker/dockerfile:1
FROM python:3.12 AS base
ENV NCCL_TREE_THRESHOLD=1 PATH="two words" \\
    NCCL_TIMEOUT=c#c NCCL_DEBUG=$A
ENV HF_HUB_OFFLINE 1
ARG CUDA_LAUNCH_BLOCKING=1
ARG OMP_NUM_THREADS
CMD ["bash", "-c", "export NCCL_TIMEOUT=1"]
"""
    assert [(finding.line, finding.variable) for finding in lint("Dockerfile", text)] == [
        (3, "NCCL_TREE_THRESHOLD"),
        (4, "NCCL_TIMEOUT"),
        (5, "HF_HUB_OFFLINE"),
        (6, "CUDA_LAUNCH_BLOCKING"),
    ]


def test_exports_of_a_shell_file_count(lint):
    text = """\
#!/bin/bash
export NCCL_TIMEOUT=1 PATH='two # words' # NCCL_TREE_THRESHOLD=3, isn't it
export CUDA_LAUNCH_BLOCKING=0 && export HF_HUB_OFFLINE=`date`
NCCL_TREE_THRESHOLD=5 python train.py --set export=6
export HF_HUB_OFFLINE \\
  TRANSFORMERS_CACHE=/cache
  export CUDA_MEMORY_FRACTION=1; python train.py
"""
    assert [(finding.line, finding.variable) for finding in lint("env.sh", text)] == [
        (2, "NCCL_TIMEOUT"),
        (6, "TRANSFORMERS_CACHE"),
        (7, "CUDA_MEMORY_FRACTION"),
    ]
