"""`osora bench-comm`: what it prints and writes, and its exit codes. Ranks are processes that it starts itself."""

import json

import pytest
import torch

from opensora_cli.cli.app import main

QUICK = ["bench-comm", "--gpus", "2", "--device", "cpu", "--max-bytes", "32", "--iters", "2"]
ONE = ["--collective", "all_to_all"]


@pytest.mark.slow
def test_two_processes_give_one_json_document(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *ONE, "--collective", "broadcast", "--json", "--quiet"]) == 0
    captured = capfd.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["schema"] == "osora.bench-comm/5"
    assert (document["shows"], document["wrong"], document["header"]["ranks"]) == ("function", 0, 2)
    assert [(row["collective"], row["size_bytes"]) for row in document["rows"]] == [
        (name, size) for name in ("all_to_all", "broadcast") for size in (8, 16, 32)
    ]
    assert [verdict["judgement"] for verdict in document["verdicts"]] == ["works", "works"]


@pytest.mark.parametrize("flags", [["--gpus", "2"], ["--devices", "0,1"]], ids=" ".join)
def test_gpus_are_not_replaced_by_processes(osora, flags: list[str]) -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has them")
    assert "use --device cpu" in osora("bench-comm", *flags, "--max-bytes", "8", code=4).err


def test_one_gpu_alone_has_no_peer(osora, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "one rank has no peer" in osora("bench-comm", "--device", "cuda", code=4).err
