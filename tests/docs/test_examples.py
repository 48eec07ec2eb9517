"""The scripts in examples/ do what they say."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from docs.pages import ROOT
from tiny_clips import write_clip

EXAMPLES = ROOT / "examples"
DEMO_WEIGHTS = ROOT / "opensora_cli" / "assets" / "demo" / "transformer.safetensors"


def main_of(name: str) -> Callable[..., None]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[..., None] = module.main
    return main


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_short_and_finds_what_it_imports(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    assert callable(main_of(path.stem))


@pytest.mark.slow
def test_image_to_video_continues_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    main_of("image_to_video")()
    assert Path("samples/boat.png").is_file()
    assert "samples/boat.mp4: the given frame came out at" in capsys.readouterr().out


def test_convert_a_checkpoint_compares_both(capsys: pytest.CaptureFixture[str]) -> None:
    main_of("convert_a_checkpoint")(str(DEMO_WEIGHTS), "wide.safetensors")
    assert "torch.float16 and torch.bfloat16\nthe largest difference" in capsys.readouterr().out


@pytest.mark.slow
def test_estimate_memory_offloads_what_16_gib_do_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    main_of("estimate_memory")()
    printed = capsys.readouterr().out
    assert "8,316 tokens, 80 evaluations" in printed
    assert "fits into 16 GiB" in printed


@pytest.mark.slow
def test_the_programs_of_the_page_about_python_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how_to" / "python.md").read_text(encoding="utf-8")
    for program in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(program, "python.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["samples/raining-sea_seed7.mp4", "samples/raining-sea_seed8.mp4"]
    assert "denoise 10 20" in printed


@pytest.mark.slow
def test_generate_a_video_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    main_of("generate_a_video")()
    assert Path("samples/example.mp4").is_file()
    assert "seed 7" in capsys.readouterr().out


@pytest.mark.slow
def test_train_a_lora_exports_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    Path("clips").mkdir()
    for index in range(4):
        write_clip(Path(f"clips/{index}.mp4"), num_frames=33, fps=12, height=128, width=128, caption="raining, sea")
    main_of("train_a_lora")("clips", "1")
    assert "1 steps: runs/demo_lora/lora" in capsys.readouterr().out
    assert Path("runs/demo_lora/lora/adapter_model.safetensors").is_file()
