from pathlib import Path

import torch

from opensora_cli.engine.estimate.offload import HostMemory
from opensora_cli.engine.mem_profile.report import (
    AttentionCost,
    LargestBatch,
    MemProfile,
    Part,
    StageProfile,
    Timeline,
    module_shares,
    profile_figure,
)
from opensora_cli.media.plots import write_figure
from opensora_cli.memory.counting import TensorBytes

MIB = 2**20


def profile() -> MemProfile:
    with TensorBytes() as counter:
        for size in range(1, 400):
            torch.zeros(size)
        counter.mark("<end>")
    measured = StageProfile(
        name="denoise",
        parts=(Part(name="weights", predicted_bytes=10 * MIB, measured_bytes=10 * MIB),),
        predicted_bytes=20 * MIB,
        measured_bytes=25 * MIB,
        modules=module_shares({"model.blocks.0.weight": (5, 20)}, {"model.blocks.0": 7}),
        timeline=Timeline.of(counter),
    )
    predicted = StageProfile(
        name="decode", parts=(), predicted_bytes=30 * MIB, measured_bytes=None, not_measured="too <large>"
    )
    return MemProfile(
        verdict="Fits: 0.0 of 1.0 GiB GPU memory",
        fits=True,
        host=HostMemory(pinned_bytes=0, page_cache_bytes=2**30),
        of="$x$ <&>",
        device="cuda:0",
        device_name="a & b",
        how="by counting",
        stages=(measured, predicted),
        attention=(
            AttentionCost(kind="flash", tokens=512, memory_bytes=MIB, seconds=0.5),
            AttentionCost(kind="absent", tokens=512, reason="not here"),
        ),
        batch=LargestBatch(batch_size=3, limit_bytes=9 * MIB, peak_bytes=8 * MIB),
        files={"plot": "memory.svg"},
    )


def test_lines_have_stages_attention_and_files():
    lines = profile().lines()
    assert lines[0] == "Fits: 0.0 of 1.0 GiB GPU memory"
    assert "host        page-locked 0.0 GiB, page cache 1.0 GiB for files of weights" in lines
    assert "  peak                                   20.00 MiB     25.00 MiB   predicted / measured 0.800" in lines
    assert "  not measured: too <large>" in lines
    assert any(line.split() == ["flash", "512", "1.00", "MiB", "500.0", "ms"] for line in lines)
    assert any(line.split() == ["absent", "512", "not", "here"] for line in lines)
    assert "batch       3 fits into 9.00 MiB: 8.00 MiB at the peak (predicted)" in lines
    assert lines[-1] == "wrote       memory.svg"


def test_the_timeline_has_few_points_and_keeps_the_peak():
    timeline = profile().stages[0].timeline
    assert timeline is not None
    assert len(timeline.live_bytes) == 160
    assert max(timeline.live_bytes) == 399 * 4
    assert timeline.marks == (("<end>", 1.0),)


def test_the_figure_has_peaks_and_timelines_with_names_as_plain_text(tmp_path: Path):
    write_figure(profile_figure(profile()), tmp_path / "memory.svg")
    text = (tmp_path / "memory.svg").read_text()
    for shown in ("Memory of $x$ &lt;&amp;&gt;", "20.00 MiB", "25.00 MiB", "decode", "&lt;end&gt;"):
        assert shown in text
