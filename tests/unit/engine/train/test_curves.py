"""`osora train --plot`: curves of runs in a chart, which is not replaced by accident."""

import json
import sys
from pathlib import Path

import pytest

from opensora_cli.cli.app import main


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two folders of runs; the log of the second ends in the middle of a line."""
    folders = [tmp_path / name for name in ("first", "second")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        lines: list[dict[str, object]] = [{"step": 0, "event": "validation", "loss": 2.0}]
        lines += [
            {"step": step, "loss": 1.0 / (step + number), "learning_rate": 0.1, "grad_norm": None if step == 2 else 3.0}
            for step in (1, 2, 3)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "log.jsonl").write_text(text + ('{"step": 4, "lo' if number else ""))
    return [str(folder) for folder in folders]


def test_curves_of_several_runs_in_one_chart(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "curves.svg"
    assert main(["train", "--plot", str(path), *runs]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    drawn = path.read_text()
    for text in ("loss", "learning rate", "gradient norm", *runs, f"{runs[0]}, validation"):
        assert f">{text}<" in drawn
    assert main(["train", "--plot", str(path), runs[0]]) == 3
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == drawn
    assert main(["train", "--plot", str(path), runs[0], "--overwrite", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"schema": "osora.train-plot/1", "plot": str(path), "runs": runs[:1]}
    assert path.read_text() != drawn


def test_a_run_that_has_logged_nothing_is_told_from_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--plot", str(tmp_path / "a.png"), str(tmp_path)]
    assert main(arguments) == 3
    assert "name the folder of a run" in capsys.readouterr().err
    (tmp_path / "settings.json").touch()
    assert main(arguments) == 3
    expected = f"error: {tmp_path} has no log yet\n       a run logs every loop.log_every steps\n"
    assert capsys.readouterr().err == expected


def test_a_missing_matplotlib_is_named(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["train", "--plot", str(tmp_path / "a.png"), *runs]) == 4
    assert "a chart needs matplotlib, which is not installed" in " ".join(capsys.readouterr().err.split())
