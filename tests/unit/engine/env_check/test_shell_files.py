"""Dockerfiles and shell files: what they set, in which lines, and what is wrong with it."""

import pytest

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.engine.env_check.report import Severity
from opensora_cli.engine.env_check.shell_files import lint_file


@pytest.fixture
def lint(tmp_path):
    def lint(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return lint_file(tmp_path / name)

    return lint


def test_env_and_arg_count_and_run_loses_its_exports(lint):
    text = """\
# syntax=docker/dockerfile:1
FROM python:3.12 AS base
ENV NCCL_TREE_THRESHOLD=1 PATH="two words" \\
    # in between

    NCCL_TIMEOUT=c#c NCCL_DEBUG=$A
ENV HF_HUB_OFFLINE 1
ARG CUDA_LAUNCH_BLOCKING=1
ARG OMP_NUM_THREADS
RUN export NCCL_DEBUG=INFO && \\
    NCCL_TIMEOUT=2 make
CMD ["bash", "-c", "export NCCL_TIMEOUT=1"]
"""
    findings = lint("Dockerfile", text)
    assert [(finding.line, finding.variable) for finding in findings] == [
        (3, "NCCL_TREE_THRESHOLD"),
        (6, "NCCL_TIMEOUT"),
        (7, "HF_HUB_OFFLINE"),
        (8, "CUDA_LAUNCH_BLOCKING"),
        (10, "NCCL_DEBUG"),
    ]
    assert (findings[-1].message, findings[-1].fix) == ("RUN sets NCCL_DEBUG for itself alone", "ENV NCCL_DEBUG=...")


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("env.sh", "export A='over\nexport NCCL_TIMEOUT=5\n"),
        ("Dockerfile", "ENV A='1\nENV NCCL_TIMEOUT=5"),
        ("Dockerfile", "RUN export A='1\nENV NCCL_TIMEOUT=5"),
    ],
)
def test_lines_that_shlex_cannot_read_are_reported_and_others_are_read(lint, name, text):
    first, second = lint(name, text)
    assert (first.line, first.severity) == (1, Severity.UNKNOWN)
    assert first.message == "could not be checked: No closing quotation"
    assert (second.line, second.variable) == (2, "NCCL_TIMEOUT")


def test_a_variable_set_twice_for_certain_is_a_finding(lint):
    text = """\
export OMP_NUM_THREADS=4
export LD_LIBRARY_PATH=/a
export LD_LIBRARY_PATH=/b:$LD_LIBRARY_PATH
NCCL_DEBUG=INFO make
if x; then
  export NCCL_DEBUG=INFO
fi
export NCCL_DEBUG=WARN
export UNRELATED=1 UNRELATED=2
export OMP_NUM_THREADS=8
"""
    (finding,) = lint("env.sh", text)
    assert (finding.line, finding.variable) == (10, "OMP_NUM_THREADS")
    assert finding.message == "OMP_NUM_THREADS is set twice, first in line 1"


def test_stages_of_a_dockerfile_are_independent(lint):
    (finding,) = lint("Dockerfile", "FROM a AS one\nENV NCCL_DEBUG=INFO\nFROM b\nENV NCCL_DEBUG=WARN\n")
    assert finding.severity is Severity.OK
    (finding,) = lint("Dockerfile", "FROM a\nARG NCCL_DEBUG=INFO\nENV NCCL_DEBUG=INFO\n")
    assert (finding.line, finding.fix) == (3, "drop line 2")


def test_findings_have_file_line_and_order(lint, tmp_path):
    findings = lint(
        "Dockerfile.gpu",
        "FROM nvidia/cuda\n"
        "ENV PYTORCH_CUDA_ALLOC_CONF=backend=native\n"
        "ENV PYTORCH_ALLOC_CONF expandable_segments:True\n"
        "ENV NCCL_TREE_THRESHOLD=0 CUDA_MEMORY_FRACTION=$SHARE\n"
        "RUN export NCCL_DEBUG=INFO && pip install .\n"
        "ENV OSORA_VIDEO__RESOLUTON=$SIZE CUDA_VISIBLE_DEVICES=$CARDS\n",
    )
    assert [(finding.line, finding.variable, finding.severity) for finding in findings] == [
        (2, "PYTORCH_CUDA_ALLOC_CONF", Severity.WARNING),
        (2, "PYTORCH_CUDA_ALLOC_CONF", Severity.PROBLEM),
        (4, "CUDA_MEMORY_FRACTION", Severity.WARNING),
        (4, "NCCL_TREE_THRESHOLD", Severity.WARNING),
        (5, "NCCL_DEBUG", Severity.WARNING),
        (6, "OSORA_VIDEO__RESOLUTON", Severity.PROBLEM),
    ]
    assert {finding.file for finding in findings} == {str(tmp_path / "Dockerfile.gpu")}
    assert findings[0].lines()[0].startswith(f"file        warning  {tmp_path / 'Dockerfile.gpu'}:2: ")


def test_a_file_without_faults_has_one_ok(lint):
    (finding,) = lint("env.sh", "export NCCL_DEBUG=WARN PATH=/bin\n")
    assert finding.severity is Severity.OK
    assert "1 variables" in finding.message


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


@pytest.mark.parametrize(
    "text",
    ["export A='never ends", 'A="', "A=$(", "A=${", "\\", "A=\\", "cat <<EOF\nA=1", "{", "}", ")", "((", "<<", "A=`"],
)
def test_torn_texts_are_read_to_their_end(lint, text):
    for tail in ("", "\n", "\nB=1\n"):
        assert lint("env.sh", f"export {text}{tail}")
        assert lint("Dockerfile", f"FROM x\nENV {text}{tail}")
