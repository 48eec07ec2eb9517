"""Each rule for environment variables, on a machine that has nothing wrong but the variable, and in files."""

import pytest
import torch

from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check.report import PROFILES, Severity
from opensora_cli.engine.env_check.variables import Surroundings, allocator_fault, lint_file, lint_variables

SERVER = Surroundings(
    uses_cuda=True,
    cores=64,
    has_nvlink=True,
    has_infiniband=True,
)
WARNING, PROBLEM = Severity.WARNING, Severity.PROBLEM


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
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", WARNING),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "TORCH_DISTRIBUTED_DEBUG", WARNING),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS", WARNING),
        ({"OMP_NUM_THREADS": "auto"}, "OMP_NUM_THREADS", WARNING),
        ({"OMP_NUM_THREADS": "65"}, "OMP_NUM_THREADS", WARNING),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"CUDA_VISIBLE_DEVICES": "cuda:0"}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"CUDA_VISIBLE_DEVICES": "0,1,0"}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"CUDA_VISIBLE_DEVICES": "0,GPU-12ab"}, "CUDA_VISIBLE_DEVICES", WARNING),
        ({"OSORA_SAMPLING__SEDE": "1"}, "OSORA_SAMPLING__SEDE", PROBLEM),
    ],
    ids=str,
)  # fmt: skip
def test_a_fault_gives_one_finding_with_reason_and_fix(variables, variable, severity):
    (finding,) = lint_variables(variables, SERVER)
    assert (finding.variable, finding.severity) == (variable, severity)
    assert finding.why
    assert finding.fix


def test_an_assertion_of_torch_is_shown_as_the_form_that_it_wants():
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this torch judges the options at the first use of a GPU")
    assert allocator_fault("backend=native") == "'backend=native' is not of the form name:value,name:value"


@pytest.mark.skipif(bool(torch.version.cuda), reason="this torch refuses unknown options itself")
@pytest.mark.parametrize(
    ("text", "unknown", "fix"),
    [
        ("foo:1", "foo", "see PYTORCH_ALLOC_CONF"),
        ("max_split_size_mb:64,expandable_segment:True", "expandable_segment", "did you mean expandable_segments?"),
    ],
)
def test_an_unknown_option_of_the_allocator_is_named(text, unknown, fix, lint):
    (finding,) = lint("Dockerfile", f'ENV PYTORCH_CUDA_ALLOC_CONF="{text}"')
    assert (finding.severity, finding.line) == (WARNING, 1)
    assert finding.message == f"PYTORCH_CUDA_ALLOC_CONF: {unknown} is not an option of torch 2.13"
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True, roundup_power2_divisions:[256:1,>:4],backend : native"},
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0", "NCCL_P2P_DISABLE": "0", "NCCL_IB_DISABLE": "0"},
        {"OMP_NUM_THREADS": "8,2"},
        {"CUDA_VISIBLE_DEVICES": "3,1"},
        {"OSORA_WEIGHTS": "/weights", "OSORA_SAMPLING__SEED": "1", "OSORA_LOOP__STEPS": "10", "OSORA_STEPZ": "3"},
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
ENV TRANSFORMERS_CACHE 1
ARG CUDA_LAUNCH_BLOCKING=1
ARG OMP_NUM_THREADS
CMD ["bash", "-c", "export NCCL_TIMEOUT=1"]
"""
    assert [(finding.line, finding.variable) for finding in lint("Dockerfile", text)] == [
        (3, "NCCL_TREE_THRESHOLD"),
        (4, "NCCL_TIMEOUT"),
        (5, "TRANSFORMERS_CACHE"),
        (6, "CUDA_LAUNCH_BLOCKING"),
    ]


def test_exports_of_a_shell_file_count(lint):
    text = """\
#!/bin/bash
export NCCL_TIMEOUT=1 PATH='two # words' # NCCL_TREE_THRESHOLD=3, isn't it
export CUDA_LAUNCH_BLOCKING=0 && export NCCL_SHM_DISABLE=`date`
NCCL_TREE_THRESHOLD=5 python train.py --set export=6
export NCCL_SHM_DISABLE \\
  TRANSFORMERS_CACHE=/cache
  export CUDA_MEMORY_FRACTION=1; python train.py
"""
    assert [(finding.line, finding.variable) for finding in lint("env.sh", text)] == [
        (2, "NCCL_TIMEOUT"),
        (6, "TRANSFORMERS_CACHE"),
        (7, "CUDA_MEMORY_FRACTION"),
    ]
