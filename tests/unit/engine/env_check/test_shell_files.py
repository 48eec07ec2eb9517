"""Dockerfiles and shell files: what they set, in which lines, and what is wrong with it."""

import pytest

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.engine.env_check.report import Severity
from opensora_cli.engine.env_check.shell_files import (
    Unread,
    is_dockerfile,
    lint_assignments,
    lint_file,
    read_dockerfile,
    read_shell,
)


def found(assignments):
    return [(item.line, item.name, item.value) for item in assignments]


def test_a_dockerfile_sets_by_env_and_arg_and_loses_what_run_exports():
    text = """\
# syntax=docker/dockerfile:1
FROM python:3.12 AS base
ENV A=1 B="two words" \\
    # in between

    C=c#c D=$A
ENV E the rest of it
ARG F=1
ARG G
RUN export H=1 && \\
    I=2 make
ENV J="a\\"b" K=a\\ b
CMD ["bash", "-c", "L=1"]
"""
    read = list(read_dockerfile(text))
    assert found(read) == [
        (3, "A", "1"),
        (3, "B", "two words"),
        (6, "C", "c#c"),
        (6, "D", None),
        (7, "E", "the rest of it"),
        (8, "F", "1"),
        (10, "H", "1"),
        (12, "J", 'a"b'),
        (12, "K", "a b"),
    ]
    assert [item.name for item in read if not item.lasts] == ["H"]


def test_a_shell_file_sets_by_export_and_assignment():
    text = """\
#!/bin/bash
export A=1 B='two # words' # C=3, isn't it
D=4; E="x$A" && export F=`date`
G=5 python train.py --set H=6
cat <<EOF
export I=7
EOF
cat <<-'END' > file
\tJ=8
\tEND
declare -x M=10
export N \\
  O=11
export P=${P:-12} Q=$(date) R=1
if [ $# -eq 0 ]; then exit 1; fi
export S=a#b T='#' U=15 # V=16
"""
    assert found(read_shell(text)) == [
        (2, "A", "1"),
        (2, "B", "two # words"),
        (3, "D", "4"),
        (3, "E", None),
        (3, "F", None),
        (4, "G", "5"),
        (11, "M", "10"),
        (13, "O", "11"),
        (14, "P", None),
        (14, "Q", None),
        (14, "R", "1"),
        (16, "S", "a#b"),
        (16, "T", "#"),
        (16, "U", "15"),
    ]
    assert next(item for item in read_shell(text) if getattr(item, "name", "") == "S").is_certain


def test_branches_and_commands_of_their_own_are_not_certain():
    text = """\
if true; then export A=1; else export A=2; fi
case $x in
  a) B=1 ;;
  b) B=2 ;;
esac
f() { C=1; }
(D=1)
for i in 1 2; do E=1; done
F=1 make
G={a,b}
H=1
"""
    assert [item.name for item in read_shell(text) if item.is_certain] == ["G", "H"]
    assert [item.name for item in read_shell(text)] == ["A", "A", "B", "B", "C", "D", "E", "F", "G", "H"]


def test_lines_that_shlex_cannot_read_are_reported_and_others_are_read(tmp_path):
    path = tmp_path / "env.sh"
    path.write_text("export A='over\nexport NCCL_TIMEOUT=5\n", encoding="utf-8")
    first, second = lint_file(path)
    assert (first.line, first.severity) == (1, Severity.UNKNOWN)
    assert first.message == "could not be checked: No closing quotation"
    assert (second.line, second.variable) == (2, "NCCL_TIMEOUT")
    assert list(read_dockerfile("FROM x\nENV A='1\nENV B=2")) == [
        Unread(2, "No closing quotation"),
        *read_dockerfile("FROM x\n\nENV B=2"),
    ]


def test_a_variable_set_twice_for_certain_is_a_finding():
    text = """\
export OMP_NUM_THREADS=4
export LD_LIBRARY_PATH=/a
export LD_LIBRARY_PATH=/b:$LD_LIBRARY_PATH
NCCL_DEBUG=INFO make
if x; then export NCCL_DEBUG=INFO; fi
export NCCL_DEBUG=WARN
export UNRELATED=1 UNRELATED=2
export OMP_NUM_THREADS=8
"""
    (finding,) = lint_assignments(list(read_shell(text)))
    assert (finding.line, finding.variable) == (8, "OMP_NUM_THREADS")
    assert "first in line 1" in finding.message
    assert "the second value wins" in finding.message


def test_stages_of_a_dockerfile_are_independent():
    once = "FROM a AS one\nENV NCCL_DEBUG=INFO\nFROM b\nENV NCCL_DEBUG=WARN\n"
    assert lint_assignments(list(read_dockerfile(once))) == []
    twice = "FROM a\nARG NCCL_DEBUG=INFO\nENV NCCL_DEBUG=INFO\n"
    (finding,) = lint_assignments(list(read_dockerfile(twice)))
    assert (finding.line, finding.fix) == (3, "drop line 2")


def test_findings_have_file_line_and_order(tmp_path):
    path = tmp_path / "Dockerfile.gpu"
    path.write_text(
        "FROM nvidia/cuda\n"
        "ENV PYTORCH_CUDA_ALLOC_CONF=backend=native\n"
        "ENV PYTORCH_ALLOC_CONF expandable_segments:True\n"
        "ENV NCCL_TREE_THRESHOLD=0 CUDA_MEMORY_FRACTION=$SHARE\n"
        "RUN export NCCL_DEBUG=INFO && pip install .\n"
        "ENV OSORA_VIDEO__RESOLUTON=$SIZE CUDA_VISIBLE_DEVICES=$CARDS\n",
        encoding="utf-8",
    )
    findings = lint_file(path)
    assert [(finding.line, finding.variable, finding.severity) for finding in findings] == [
        (2, "PYTORCH_CUDA_ALLOC_CONF", Severity.WARNING),
        (2, "PYTORCH_CUDA_ALLOC_CONF", Severity.PROBLEM),
        (4, "CUDA_MEMORY_FRACTION", Severity.WARNING),
        (4, "NCCL_TREE_THRESHOLD", Severity.WARNING),
        (5, "NCCL_DEBUG", Severity.WARNING),
        (6, "OSORA_VIDEO__RESOLUTON", Severity.PROBLEM),
    ]
    assert {finding.file for finding in findings} == {str(path)}
    assert findings[0].lines()[0].startswith(f"file        warning  {path}:2: ")


def test_a_file_without_faults_has_one_ok(tmp_path):
    path = tmp_path / "env.sh"
    path.write_text("export NCCL_DEBUG=WARN PATH=/bin\n", encoding="utf-8")
    (finding,) = lint_file(path)
    assert finding.severity is Severity.OK
    assert "1 variables" in finding.message


@pytest.mark.parametrize(
    ("name", "text", "is_docker"),
    [
        ("Dockerfile", "", True),
        ("train.dockerfile", "", True),
        ("Containerfile", "", True),
        ("build", "# comment\n\nFROM python\n", True),
        ("build", "arg VERSION=1\nFROM x:$VERSION", True),
        ("run.sh", "export A=1", False),
        ("setup", "#!/bin/sh\nfrom=1", False),
    ],
)
def test_dockerfiles_are_recognised_by_name_and_content(name, text, is_docker):
    assert is_dockerfile(name, text) is is_docker


def test_missing_binary_and_large_files_are_refused(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**21)
    for path, message in (
        (tmp_path / "gone", "does not exist"),
        (tmp_path, "cannot be read"),
        (binary, "not text"),
        (large, "too large"),
    ):
        with pytest.raises(FileProblem, match=message):
            lint_file(path)


@pytest.mark.parametrize(
    "text",
    ["export A='never ends", 'A="', "A=$(", "A=${", "\\", "A=\\", "cat <<EOF\nA=1", "{", "}", ")", "((", "<<", "A=`"],
)
def test_torn_texts_are_read_to_their_end(text):
    for tail in ("", "\n", "\nB=1\n"):
        list(read_shell(text + tail))
        list(read_dockerfile(f"FROM x\nENV {text}{tail}"))
        list(read_dockerfile(f"RUN {text}{tail}"))
