"""How long plans of the released model would take on GPUs that are not here."""

from functools import cache

import pytest
from small_stages import small_stages

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.engine.estimate.predicted_time import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    DECODING,
    EIGHT_BITS,
    PRODUCTS,
    TRAFFIC,
)
from opensora_cli.engine.generate.chain import Chain, make_chain
from opensora_cli.engine.generate.dry_run import hardware_of_ranks
from opensora_cli.engine.generate.plan import Plan, make_plan
from opensora_cli.engine.generate.predicted import decoding, evaluation, loading, predict_time
from opensora_cli.settings.hardware import GpuSettings, read_machine
from opensora_cli.settings.load import load_preset

PRESET = load_preset("256px", prompt="raining, sea")


@cache
def gpu_of(name: str) -> GpuSettings:
    return read_machine(name).gpu


@pytest.fixture(autouse=True)
def _estimates_are_not_the_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)


def planned(name: str = "H100", **changes: object) -> Plan:
    settings = PRESET.replace({key.replace("__", "."): value for key, value in changes.items()})
    return make_plan(settings, hardware=hardware_of_ranks(settings, gpu=gpu_of(name)), tries_device=False)


def chain_of(**changes: object) -> Chain:
    settings = PRESET.replace({key.replace("__", "."): value for key, value in changes.items()})
    return make_chain(settings, hardware=hardware_of_ranks(settings, gpu=gpu_of("H100")), tries_device=False)


def test_parts_and_stages_add_up() -> None:
    found = predict_time(chain_of(), gpu_of("H100"))
    assert found.hardware == "1xH100"
    assert set(found.stages_s) == {"load", "text", "denoise", "decode"}
    assert sum(found.stages_s.values()) == pytest.approx(found.seconds)
    assert sum(found.parts_s.values()) == pytest.approx(found.seconds)
    of_evaluation = evaluation(planned(), gpu_of("H100"))
    # 50 steps are 80 evaluations.
    assert found.stages_s["denoise"] == pytest.approx(80 * sum(of_evaluation.values()))
    twice = predict_time(chain_of(sampling__num_samples=2), gpu_of("H100"))
    assert twice.stages_s["decode"] == pytest.approx(2 * found.stages_s["decode"])
    assert twice.stages_s["load"] == found.stages_s["load"]


def test_ranks_share_tokens_tiles_and_branches() -> None:
    alone, eight = planned(), planned(parallel__gpus=8)
    one, shared = (evaluation(plan, gpu_of("H100")) for plan in (alone, eight))
    assert shared[ATTENTION] == pytest.approx(one[ATTENTION] / 8, rel=0.01)
    assert one[COLLECTIVES] == 0.0 < shared[COLLECTIVES]
    # Two tiles: each is decoded by one.
    assert decoding(eight, gpu_of("H100"))[DECODING] == decoding(alone, gpu_of("H100"))[DECODING] / 2
    branches = planned(parallel__gpus=2, parallel__cfg_parallel_degree=2)
    # 30 steps have two branches, 20 have one.
    assert [plan.evaluations_after(0, ranks=plan.mesh.guidance) for plan in (alone, branches)] == [80, 50]
    assert evaluation(branches, gpu_of("H100"))[PRODUCTS] == one[PRODUCTS]


def test_links_between_machines_are_slower() -> None:
    inside = planned(parallel__gpus=8, parallel__ulysses_degree=8)
    between = planned(parallel__gpus=4, parallel__nnodes=2, parallel__ulysses_degree=8)
    waited = [evaluation(plan, gpu_of("H100"))[COLLECTIVES] for plan in (inside, between)]
    assert waited[1] > 5 * waited[0]


def test_streamed_blocks_are_copied_for_each_evaluation() -> None:
    gpu = gpu_of("4090")
    blocks = {"memory__offload": "blocks", "memory__resident_blocks": 2}
    pinned = planned("4090", **blocks, memory__host_weights="pinned")
    mapped = planned("4090", **blocks, memory__host_weights="mapped")
    resident = planned("4090", memory__offload="none")
    # The layers of modulation come once for a video.
    whole = 2 * (11_891_390_528 - 3_247_448_064)
    waited = evaluation(mapped, gpu)[COPIES]
    # Nothing but what is outside the blocks stays.
    assert 0.95 * whole < waited * 12.5e9 < whole
    computed = sum(evaluation(resident, gpu).values())
    assert evaluation(pinned, gpu)[COPIES] == pytest.approx(max(0.0, waited / 2 - computed), abs=1e-9)
    assert COPIES not in evaluation(resident, gpu)
    assert loading(mapped, gpu)[COPIES] < loading(resident, gpu)[COPIES]
    in_8_bits = planned("4090", **blocks, memory__host_weights="mapped", memory__fp8_storage=True)
    assert evaluation(in_8_bits, gpu)[COPIES] == pytest.approx(waited / 2, rel=0.02)
    # Modulation, a quarter of the weights, is not quantized.
    quantized = planned("4090", **blocks, memory__host_weights="mapped", precision__linear="int8")
    assert 0.5 * waited < evaluation(quantized, gpu)[COPIES] < 0.65 * waited


@pytest.mark.parametrize(("kind", "name"), [("int8", "A100-80GB"), ("fp8", "H100")])
def test_products_in_8_bits_have_their_own_peak(kind: str, name: str) -> None:
    gpu = gpu_of(name)
    plain = evaluation(planned(name), gpu)
    found = evaluation(planned(name, precision__linear=kind), gpu)
    peak = gpu.int8_tops if kind == "int8" else gpu.fp8_tflops
    assert peak is not None
    # All but modulation and what is outside the blocks.
    assert found[EIGHT_BITS] == pytest.approx((plain[PRODUCTS] - found[PRODUCTS]) * gpu.bf16_tflops / peak, rel=0.03)
    assert found[PRODUCTS] < 0.05 * plain[PRODUCTS]
    # Rounding and scaling are kernels of their own.
    assert found[TRAFFIC] > plain[TRAFFIC]
    assert loading(planned(name, precision__linear=kind), gpu)[COPIES] < 0.8 * loading(planned(name), gpu)[COPIES]


def test_what_a_gpu_cannot_multiply_is_not_predicted() -> None:
    with pytest.raises(HardwareError, match="A100-80GB has none"):
        evaluation(planned("A100-80GB", precision__linear="fp8"), gpu_of("A100-80GB"))
    unknown = gpu_of("H100").replace({"int8_tops": None})
    with pytest.raises(RequestError, match="needs int8_tops in the file"):
        evaluation(planned(precision__linear="int8"), unknown)


def test_references_drafts_and_extensions_take_their_time() -> None:
    plain = predict_time(chain_of(), gpu_of("H100"))
    given = predict_time(chain_of(condition__mode="i2v_head", condition__references=("a.png",)), gpu_of("H100"))
    assert given.stages_s["encode"] > 0
    extended = predict_time(chain_of(video__extend=2), gpu_of("H100"))
    assert extended.stages_s["denoise"] == pytest.approx(plain.stages_s["denoise"])
    assert extended.stages_s["extend denoise"] > 2 * plain.stages_s["denoise"]
    picture = load_preset("t2i2v_256px", prompt="raining, sea")
    chain = make_chain(picture, hardware=hardware_of_ranks(picture, gpu=gpu_of("H100")), tries_device=False)
    assert "picture denoise" in predict_time(chain, gpu_of("H100")).stages_s
