"""Dockerfiles and shell files: what they set, in which lines, and what is wrong with it."""

import pytest

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.engine.env_check.report import Finding, Severity
from opensora_cli.engine.env_check.shell_files import is_dockerfile, lint_file, read_dockerfile, read_shell


def found(items):
    return [(item.line, item.name, item.value) for item in items if not isinstance(item, Finding)]


@pytest.fixture
def lint(tmp_path):
    def lint(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return lint_file(tmp_path / name)

    return lint


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
RUN export NCCL_DEBUG=INFO && \\
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
        (12, "J", 'a"b'),
        (12, "K", "a b"),
    ]
    (lost,) = [item for item in read if isinstance(item, Finding)]
    assert (lost.line, lost.variable) == (10, "NCCL_DEBUG")
    assert (lost.message, lost.fix) == ("RUN sets NCCL_DEBUG for itself alone", "ENV NCCL_DEBUG=...")


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
if [ $# -eq 0 ]; then exit 1; fi
export I=a#b
"""
    assert [item.name for item in read_shell(text) if item.is_certain] == ["G", "H", "I"]
    assert [item.name for item in read_shell(text)] == ["A", "A", "B", "B", "C", "D", "E", "F", "G", "H", "I"]


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
if x; then export NCCL_DEBUG=INFO; fi
export NCCL_DEBUG=WARN
export UNRELATED=1 UNRELATED=2
export OMP_NUM_THREADS=8
"""
    (finding,) = lint("env.sh", text)
    assert (finding.line, finding.variable) == (8, "OMP_NUM_THREADS")
    assert finding.message == "OMP_NUM_THREADS is set twice, first in line 1, and the second value wins"


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
def test_torn_texts_are_read_to_their_end(text):
    for tail in ("", "\n", "\nB=1\n"):
        list(read_shell(text + tail))
        list(read_dockerfile(f"FROM x\nENV {text}{tail}"))
        list(read_dockerfile(f"RUN {text}{tail}"))
