"""`--dry-run --on`: plans for GPUs that are not here."""

import json

import pytest
import tiny_training
import yaml
from small_stages import small_stages
from tiny_training import rank_memory

from opensora_cli.engine.train import plan as train_plan

GENERATE = ["generate", "raining, sea", "--res", "256px"]
GIB = 2**30


@pytest.fixture
def _small_stages(monkeypatch):
    # Estimates have tests of their own.
    monkeypatch.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)


@pytest.fixture
def recipe(tmp_path):
    settings = tiny_training.mmdit_settings(tmp_path / "run").model_dump(mode="json")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return ["train", "--config", str(tmp_path / "tiny.yaml"), "--set", "optimizer.name=adamw", "--device", "auto"]


@pytest.mark.usefixtures("_small_stages")
def test_a_video_is_planned_for_what_is_named(osora):
    out, err = osora(*GENERATE, "--dry-run", "--on", "8xH100", "--json")
    document = json.loads(out)
    # Neither weights nor a GPU are here.
    assert "warning" not in err
    [job] = document["jobs"]
    assert (job["model"], document["device"], document["dtype"]) == ("open-sora-v2", "cuda", "bfloat16")
    assert (document["device_name"], document["fits"]) == ("NVIDIA H100 80GB HBM3", True)
    assert document["free_bytes"] / GIB == pytest.approx(81_559 / 1024 - 1)
    assert job["mesh"]["ulysses"] == 8
    predicted = document["predicted"]
    assert (predicted["predicted"], predicted["hardware"]) == (True, "8xH100")
    assert document["verdict"].startswith("Fits: 0.0 of 78.6 GiB GPU memory, 31.7 GiB host memory, about ")
    assert document["host"] == {"pinned_bytes": 0, "page_cache_bytes": pytest.approx(31.7 * GIB, rel=0.01)}
    assert predicted["seconds"] == pytest.approx(sum(predicted["parts_s"].values()))
    assert {"matrix products", "attention", "memory traffic", "collectives", "host copies"} <= set(predicted["parts_s"])
    out = osora(*GENERATE, "--dry-run", "--on", "8xH100", "--gpus", "2").out
    assert "devices   2, Ulysses 2\n" in out
    assert "for 1 sample on 2xH100, not measured: " in out


@pytest.mark.usefixtures("_small_stages")
def test_what_does_not_fit_there_ends_with_4(osora):
    out, err = osora(*GENERATE, "--dry-run", "--on", "H100", "--memory-limit", "1", code=4)
    assert out.startswith("Does not fit: 0.0 of 0.0 GiB GPU memory, ")
    assert "memory.limit allows" in err
    assert "on cuda (NVIDIA H100 80GB HBM3)" in err


def test_a_training_is_planned_for_what_is_named(recipe, osora, monkeypatch):
    kinds = []

    def estimate(settings, *, reporter):
        kinds.append((settings.device, settings.train_mmdit.frozen_dtype))
        return rank_memory(30 * GIB)

    monkeypatch.setattr(train_plan, "estimate_rank", estimate)
    sharded = [*recipe, "--set", "strategy=zero2", "--dry-run"]
    document = json.loads(osora(*sharded, "--on", "16xH100", "--json").out)
    assert (document["schema"], document["fits"]) == ("osora.train-plan/7", True)
    assert document["settings"]["parallel"]["nnodes"] == 2
    assert document["predicted"]["hardware"] == "16xH100"
    assert document["predicted"]["stages_s"]["forward and backward"] > 0
    # As frozen parts compute there.
    assert kinds == [("cuda", "bfloat16")]
    out, err = osora(*sharded, "--on", "2x4090", code=4)
    assert out.startswith("Does not fit: 30.0 of 23.0 GiB GPU memory, 0.0 GiB host memory, about ")
    assert "a step of 2 micro-batches, each 2 clips of 13 frames, 48x24 on 2x4090, not measured" in out
    assert "a rank does not fit in memory (30.0 of 23.0 GiB GPU memory, " in err


@pytest.mark.usefixtures("_small_stages")
def test_needs_no_prompt_and_takes_a_table(osora, tmp_path):
    table = tmp_path / "prompts.csv"
    table.write_text("prompt,num_frames\nsea,129\nforest,129\nmoon,65\n")
    verdicts = []
    for words in ([], ["--prompts", str(table)]):
        out = osora("generate", *words, "--res", "256px", "--dry-run", "--on", "12GiB").out
        assert "on cuda (a GPU with 12GiB), bfloat16\n" in out
        verdicts.append(out.splitlines()[0])
    assert verdicts[0] == verdicts[1] == "Fits: 0.0 of 11.0 GiB GPU memory, 31.7 GiB host memory"
    assert "\nrows      3 of 2 shapes, and 0 that would be refused\n" in out


@pytest.mark.usefixtures("_small_stages")
def test_commands_agree_on_the_same_request(osora):
    plan = json.loads(osora(*GENERATE, "--dry-run", "--on", "2x4090", "--json").out)
    profile = json.loads(osora("mem-profile", "--config", "256px", "--on", "2x4090", "--json").out)
    assert {key: profile[key] for key in ("verdict", "fits", "host")} == {
        key: plan[key] for key in ("verdict", "fits", "host")
    }
    assert profile["device_name"] == plan["device_name"]
    assert "--compare has no effect with --on" in osora("mem-profile", "--on", "4090", "--compare", code=2).err


@pytest.mark.usefixtures("_small_stages")
def test_the_plan_shows_the_exchange(osora):
    settings = ["all_to_all=hierarchical", "fast_link_ranks=2", "ulysses_degree=4", "compression=fp8"]
    short = ["generate", "raining, sea", "--device", "cpu", "--num-frames", "5"]
    words = [*short, "--gpus", "4", "--dry-run", *(word for each in settings for word in ("--set", f"parallel.{each}"))]
    line = next(line for line in osora(*words).out.splitlines() if line.startswith("exchange"))
    assert line.startswith("exchange  hierarchical, 2 x 2 ranks, fp8; all ranks send ")
    exchange = json.loads(osora(*words, "--json").out)["jobs"][0]["exchange"]
    assert exchange["how"].startswith("hierarchical, 2 x 2 ranks, fp8")
    assert sorted(exchange["bytes_per_evaluation"]) == ["between", "inside"]
