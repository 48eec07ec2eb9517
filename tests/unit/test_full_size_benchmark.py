"""The benchmark at full size: what it writes is whole, goes on after an interruption, and goes away."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open

from opensora_cli.core.exceptions import OutputError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "full_size.py"
FILES = {
    "Open_Sora_v2.safetensors",
    "hunyuan_vae.safetensors",
    "google/t5-v1_1-xxl/model.safetensors",
    "openai/clip-vit-large-patch14/model.safetensors",
}


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


def test_weights_have_the_released_names_and_values_that_are_no_zeros(benchmark, place):
    made = benchmark.make_weights(place)
    assert contents(place).keys() == FILES
    assert made["written_gb"] == sum(path.stat().st_size for path in contents(place).values()) / 1e9
    for path in contents(place).values():
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert 0.001 < file.get_tensor(name).float().abs().mean() < 0.1


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


def test_the_space_is_asked_for_first(benchmark, place, monkeypatch):
    def full(path, needed):
        assert needed > 10**6
        raise OutputError("no room")

    monkeypatch.setattr(benchmark, "require_space", full)
    with pytest.raises(OutputError, match="no room"):
        benchmark.make_weights(place)
    assert contents(place) == {}


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


def test_the_table_has_what_was_measured_beside_the_plan(benchmark):
    plan = {"peak_gib": 3.0, "stages_gib": {"text": {"private": 3.0, "mapped": 8.9}}}
    training = benchmark._plan_of({"memory": [{"rank": 0, "peak_bytes": 5 * 2**30, "weights_bytes": 2**30}]})
    assert training["most_gib"] == {"weights": 1.0}
    records = {
        "weights": {"seconds": 100.4, "written_gb": 34.0},
        "generate": {"seconds": 9.6, "private_gib": 3.1, "mapped_gib": 9.0, "read_gb": 12.0, "plan": plan},
        "LoRA": {"seconds": 20.0, "private_gib": 5.1, "mapped_gib": 9.0, "read_gb": 2.0, "plan": training},
    }
    assert benchmark.table(records).splitlines()[2:] == [
        "| weights | 100 |  |  |  |  |  |",
        "| generate | 10 | 3.10 | 3.00 | 9.00 | 8.90 | 12.00 |",
        "| LoRA | 20 | 5.10 | 5.00 | 9.00 |  | 2.00 |",
    ]


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
