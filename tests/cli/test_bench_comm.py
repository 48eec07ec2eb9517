"""`osora bench-comm`: what it prints and writes, and its exit codes. Ranks are processes that it starts itself."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from imported_modules import modules_after

from opensora_cli.cli.app import main
from opensora_cli.cli.bench_comm import rank_arguments
from opensora_cli.engine.launch import launcher
from opensora_cli.settings.enums import Collective, Scaling
from opensora_cli.settings.tools import BenchCommSettings

QUICK = ["bench-comm", "--gpus", "2", "--device", "cpu", "--max-bytes", "32", "--iters", "2"]
ONE = ["--collective", "all_to_all"]


@pytest.mark.slow
def test_help_and_wrong_requests_need_no_torch() -> None:
    refused = ("--gpus 1", "--min-bytes 1KiB --max-bytes 8", "--json --csv")
    modules = modules_after("bench-comm --help", *(f"bench-comm {flags}" for flags in refused))
    assert "opensora_cli.cli.bench_comm" in modules
    assert modules & {"torch", "transformers", "numpy"} == set()


@pytest.mark.slow
def test_two_processes_give_one_json_document_and_a_chart(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = ["--plot", str(tmp_path / "links.svg")]
    assert main([*QUICK, *ONE, "--collective", "gather_split", *plot, "--json", "--quiet"]) == 0
    captured = capfd.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["schema"] == "osora.bench-comm/1"
    assert (document["shows"], document["wrong"], document["header"]["ranks"]) == ("function", 0, 2)
    assert [(row["collective"], row["size_bytes"]) for row in document["rows"]] == [
        (name, size) for name in ("all_to_all", "gather_split") for size in (8, 16, 32)
    ]
    assert [verdict["judgement"] for verdict in document["verdicts"]] == ["works", "works"]
    assert document["files"] == {"plot": plot[1]}
    assert ElementTree.parse(plot[1]).getroot().tag.endswith("svg")

    assert main([*QUICK, *ONE, *plot]) == 3
    captured = capfd.readouterr()
    assert "exists already" in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_the_table_grows_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *ONE]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "backend     gloo, 2 ranks on 1 host, plain buffers"
    head = next(index for index, line in enumerate(lines) if line.startswith("collective"))
    rows = [line.split() for line in lines[head + 1 : head + 4]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("all_to_all", size, "0") for size in ("8", "16", "32")]
    (verdict,) = [line for line in lines if line.startswith("verdict")]
    assert "gloo shows function, not speed" in verdict


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_of_all_to_all_is_right_and_its_bytes_are_counted(
    capfd: pytest.CaptureFixture[str], ranks: int
) -> None:
    kinds = ["all_to_all", "hierarchical", "all_to_all_bf16", "all_to_all_fp8", "overlap"]
    sizes = ["--gpus", str(ranks), "--device", "cpu", "--min-bytes", "64KiB", "--max-bytes", "64KiB", "--iters", "1"]
    named = [word for kind in kinds for word in ("--collective", kind)]
    assert main(["bench-comm", *sizes, *named, "--json", "--quiet"]) == 0
    document = json.loads(capfd.readouterr().out)
    sent = {row["collective"]: row["sent_bytes_per_rank"] for row in document["rows"]}
    direct = 2**16 * (ranks - 1) / ranks
    expected = {"all_to_all": direct, "all_to_all_bf16": direct / 2, "all_to_all_fp8": direct * 132 / 512}
    if ranks == 4:
        # Half inside and half between: more than the direct one, in fewer messages.
        expected["hierarchical"] = 2**16
    assert sent == expected
    assert document["wrong"] == 0
    chunks = {row["chunks"]: row["exposed_bytes"] / row["sent_bytes"] for row in document["overlap"]}
    assert chunks[1] == 1
    assert chunks[2] == pytest.approx(1 / 2)
    assert chunks[4] < chunks[2]


@pytest.mark.slow
def test_csv_on_stdout_and_the_live_table_on_stderr(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launcher.tempfile, "gettempdir", lambda: str(tmp_path))
    assert main([*QUICK, *ONE, "--csv"]) == 0
    assert list(tmp_path.iterdir()) == []  # logs are of use after a failure only
    captured = capfd.readouterr()
    rows = list(csv.DictReader(captured.out.splitlines()))
    assert [(row["collective"], row["size_bytes"], row["wrong"]) for row in rows] == [
        ("all_to_all", size, "0") for size in ("8", "16", "32")
    ]
    assert sum(line.startswith("all_to_all  ") for line in captured.err.splitlines()) == 3


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--iters", "0"], 2, "iters=0 must be at least 1 (from --iters)"),
        (["--json", "--csv"], 2, "both print to stdout"),
        (["--device", "cpu", "--devices", "0,1"], 2, "drop one of them"),
    ],
)
def test_wrong_requests(capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str) -> None:
    assert main(["bench-comm", *args]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_more_gpus_than_there_are(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    assert main(["bench-comm", "--gpus", "4", "--device", "cuda"]) == 4
    assert "gpus=4, and this machine has 2: cuda:0 (card 0), cuda:1 (card 1)" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--gpus", "2"], ["--devices", "0,1"]], ids=" ".join)
def test_gpus_are_not_replaced_by_processes(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has them")
    assert main(["bench-comm", *flags, "--max-bytes", "8"]) == 4
    assert "use --device cpu" in capsys.readouterr().err


def test_one_gpu_alone_has_no_peer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["bench-comm", "--device", "cuda"]) == 4
    assert "one rank has no peer" in capsys.readouterr().err


def test_one_rank_of_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["bench-comm", "--device", "cpu"]) == 2
    assert "one rank has no peer" in capsys.readouterr().err


def test_ranks_get_all_that_their_launcher_was_told() -> None:
    settings = BenchCommSettings(
        device="cpu",
        min_bytes="1KiB",
        max_bytes="1MiB",
        iters=3,
        warmup=4,
        collectives=(Collective.BROADCAST,),
        scaling=Scaling.WEAK,
        plot="a b.svg",
        overwrite=True,
    )
    assert rank_arguments(settings, csv=True, as_json=False, quiet=True) == [
        "bench-comm",
        "--device=cpu",
        "--min-bytes=1024",
        "--max-bytes=1048576",
        "--iters=3",
        "--warmup=4",
        "--scaling=weak",
        "--plot=a b.svg",
        "--collective=broadcast",
        "--overwrite",
        "--csv",
        "--quiet",
    ]
    named = {flag for flag in BenchCommSettings.model_fields if flag not in ("parallel", "collectives")}
    assert named == {"device", "min_bytes", "max_bytes", "iters", "warmup", "scaling", "plot", "overwrite"}
