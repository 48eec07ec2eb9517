"""The benchmark at full size: what it writes is whole, goes on after an interruption, and goes away."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "full_size.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_full_size", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._NOISE_NUMBERS = 2**16
    return module


@pytest.fixture
def place(benchmark, tmp_path):
    return benchmark.Place(tmp_path / "run", tiny=True)


def contents(place):
    return {path.relative_to(place.weights).as_posix(): path for path in place.weights.rglob("*.safetensors")}


def test_what_an_interruption_left_is_gone_on_with(benchmark, place):
    benchmark.make_weights(place)
    whole = {name: path.read_bytes() for name, path in contents(place).items()}
    kept = contents(place)["hunyuan_vae.safetensors"].stat()
    for name, size in (("Open_Sora_v2.safetensors", 100_001), ("google/t5-v1_1-xxl/model.safetensors", 10)):
        path = place.weights / name
        path.with_suffix(".part").write_bytes(whole[name][:size])
        path.unlink()
    benchmark.make_weights(place)
    assert {name: path.read_bytes() for name, path in contents(place).items()} == whole
    assert contents(place)["hunyuan_vae.safetensors"].stat().st_mtime_ns == kept.st_mtime_ns
    assert [*place.weights.rglob("*.part")] == []


def test_clean_removes_what_the_run_has_made_alone(benchmark, place):
    benchmark.make_weights(place)
    benchmark.make_data(place)
    place.converted.write_bytes(b"")
    mine = place.folder / "mine.txt"
    mine.write_text("")
    benchmark.main(["--folder", str(place.folder), "--clean"])
    assert [*place.folder.iterdir()] == [mine]
    mine.unlink()
    place.clean()
    assert not place.folder.exists()


@pytest.mark.slow
def test_every_step_runs(benchmark, place, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    arguments = ["--folder", str(place.folder), "--tiny", "--threads", "1", "--log", str(log)]
    benchmark.main(arguments)
    records = benchmark.read_log(log)
    assert [*records] == ["weights", *(step.name for step in benchmark.STEPS)]
    assert records["generate"]["model_evaluations"] == records["generate in 6 GiB"]["model_evaluations"] > 0
    assert not records["generate"]["plan"]["cached_text"]
    assert records["generate in 6 GiB"]["plan"]["cached_text"]
    assert records["encode for LoRA"]["encoded"] == 1
    assert records["LoRA"]["plan"]["peak_gib"] > 0 < records["LoRA"]["parameters"]
    lines = len(log.read_text().splitlines())
    benchmark.main(arguments)  # all of it is finished
    assert len(log.read_text().splitlines()) == lines
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("| LoRA |")
