"""Exchanges of tokens for heads as the commands make them: what each sends, and that the result is that of one rank."""

import json
import os
import socket
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from opensora_cli.cli.app import main

pytestmark = pytest.mark.usefixtures("no_ranks_around")
SHORT = ["generate", "raining, sea", "--seed", "7", "--device", "cpu", "--num-frames", "5", "--steps", "2"]
SHORT += ["--set", "video.height=32", "--set", "video.width=32", "--format", "png", "--quiet"]


def counted(words: list[str]) -> int:
    """Run a command as one rank, and print what it sends in all-to-alls: bytes by the ranks of each group."""
    exchange, sent = dist.all_to_all_single, dict[str, int]()

    def counting(
        received: torch.Tensor, flat: torch.Tensor, expected: list[int], lengths: list[int], **kwargs: Any
    ) -> Any:
        group = kwargs["group"]
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        sent[ranks] = sent.get(ranks, 0) + (sum(lengths) - lengths[group.rank()]) * flat.itemsize
        return exchange(received, flat, expected, lengths, **kwargs)

    with patch.object(dist, "all_to_all_single", counting):
        code = main(words)
    print(json.dumps(sent))
    return code


def run(processes: Any, folder: Path, words: list[str], *, ranks: int, machines: int) -> list[dict[str, int]]:
    """Run a command on ranks as torchrun starts them, and return what each counted."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started, local = [], ranks // machines
    of_all = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": machines}
    of_all |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for rank in range(ranks):
        variables = {**of_all, "RANK": rank, "LOCAL_RANK": rank % local}
        with patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
            started.append(processes.program(folder, counted, words))
    ends = [program.end(240.0) for program in started]
    assert [code for code, _, _ in ends] == [0] * ranks, ends
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ends]


def frames(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in sorted(folder.glob("*.png"))])


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "more"), [(2, ()), (1, ("fast_link_ranks=2",))])
def test_two_machines_generate_what_one_rank_does(
    processes: Any, tmp_path: Path, machines: int, more: tuple[str, ...]
) -> None:
    one, many = tmp_path / "one.png", tmp_path / "many.png"
    assert main([*SHORT, "--out", str(one)]) == 0
    settings = ("ulysses_degree=4", "all_to_all=hierarchical", *more)
    words = [word for each in settings for word in ("--set", f"parallel.{each}")]
    sent = run(processes, tmp_path, [*SHORT, "--out", str(many), *words], ranks=4, machines=machines)
    assert np.abs(frames(tmp_path / "many") - frames(tmp_path / "one")).max() <= 1
    assert [sorted(of_rank) for of_rank in sent] == [
        ["0,1", "0,2"],
        ["0,1", "1,3"],
        ["0,2", "2,3"],
        ["1,3", "2,3"],
    ]
    inside = sum(size for of_rank in sent for ranks, size in of_rank.items() if ranks in ("0,1", "2,3"))
    between = sum(size for of_rank in sent for ranks, size in of_rank.items() if ranks in ("0,2", "1,3"))
    sidecar = json.loads((tmp_path / "many.json").read_text())
    planned = sidecar["exchange"]["bytes_per_evaluation"]
    evaluations = sidecar["model_evaluations"]
    assert planned == {"inside": inside // evaluations, "between": between // evaluations}


def test_the_plan_shows_the_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["all_to_all=hierarchical", "fast_link_ranks=2", "ulysses_degree=4", "compression=fp8"]
    words = [*SHORT, "--gpus", "4", "--dry-run", *(word for each in settings for word in ("--set", f"parallel.{each}"))]
    assert main(words) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("exchange"))
    assert line.startswith("exchange  hierarchical, 2 x 2 ranks, fp8 (elements off by at most 1/16); all ranks send ")
    assert main([*words, "--json"]) == 0
    exchange = json.loads(capsys.readouterr().out)["jobs"][0]["exchange"]
    assert (exchange["all_to_all"], exchange["compression"], exchange["inner_ranks"]) == ("hierarchical", "fp8", 2)
    assert sorted(exchange["bytes_per_evaluation"]) == ["between", "inside"]
