"""Dockerfiles and shell files: what they set, in which lines, and what is wrong with it."""

import pytest

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.engine.env_check import variables
from opensora_cli.engine.env_check.report import Severity
from opensora_cli.engine.env_check.shell_files import lint_file


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


def test_findings_have_file_line_and_order(lint, tmp_path, monkeypatch):
    # torch, which judges these values in a process of its own, does so in test_variables.
    monkeypatch.setattr(variables, "allocator_fault", lambda text: "no colon" if "=" in text else None)
    findings = lint(
        "Dockerfile.gpu",
        "FROM nvidia/cuda\n"
        "ENV PYTORCH_CUDA_ALLOC_CONF=backend=native\n"
        "ENV PYTORCH_ALLOC_CONF expandable_segments:True\n"
        "ENV NCCL_TREE_THRESHOLD=0 CUDA_MEMORY_FRACTION=$SHARE\n"
        "RUN pip install .\n"
        "ENV OSORA_VIDEO__RESOLUTON=$SIZE CUDA_VISIBLE_DEVICES=$CARDS\n",
    )
    assert [(finding.line, finding.variable, finding.severity) for finding in findings] == [
        (2, "PYTORCH_CUDA_ALLOC_CONF", Severity.WARNING),
        (2, "PYTORCH_CUDA_ALLOC_CONF", Severity.PROBLEM),
        (4, "CUDA_MEMORY_FRACTION", Severity.WARNING),
        (4, "NCCL_TREE_THRESHOLD", Severity.WARNING),
        (6, "OSORA_VIDEO__RESOLUTON", Severity.PROBLEM),
    ]
    assert {finding.file for finding in findings} == {str(tmp_path / "Dockerfile.gpu")}
    assert findings[0].lines()[0].startswith(f"file        warning  {tmp_path / 'Dockerfile.gpu'}:2: ")


def test_missing_binary_and_large_files_are_refused(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**21)
    for path, message in (
        (tmp_path / "gone", "does not exist"),
        (tmp_path, "it is a folder"),
        (binary, "not text"),
        (large, "more than 1,048,576 bytes"),
    ):
        with pytest.raises(FileProblem, match=message):
            lint_file(path)
