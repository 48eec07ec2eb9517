"""The table and the chart of a comparison."""

from pathlib import Path
from xml.etree import ElementTree

from opensora_cli.engine.bench_generate.report import BenchedSetting, BenchGenerateReport


def row(name: str, **changes: object) -> BenchedSetting:
    values: dict[str, object] = {
        "name": name,
        "changes": {},
        "ran": {"attention": "sdpa"},
        "runs": 1,
        "stages_s": {"load": 9.0, "text": 0.25, "denoise": 2.0, "decode": 0.75},
        "loading_s": 9.0,
        "seconds": 3.0,
        "spread_s": 0.0,
        "evaluations": 50,
        "speedup": 1.0,
        "peak_memory_gib": None,
        "psnr_db": None,
        "ssim": None,
        "latents_error": None,
        "without_effect": None,
    }
    return BenchedSetting.model_validate(values | changes)


def report(*rows: BenchedSetting) -> BenchGenerateReport:
    return BenchGenerateReport(
        of="64x64, by demo in 30 steps",
        prompt="sea",
        seed=42,
        device="cpu",
        device_name="a CPU",
        ranks=2,
        repeats=1,
        settings=rows,
        left_out={"euler-30": "50 evaluations, and the exact run takes 50"},
        exact_error=0.0,
        is_whole=True,
        notes=(),
        files={"plot": "a.svg"},
    )


TRIED = row("ab2-15", evaluations=28, speedup=1.5, psnr_db=21.25, ssim=0.875, latents_error=0.1234, peak_memory_gib=0.5)
SAME = row("x=1", psnr_db=99.0, ssim=1.0, latents_error=0.0, without_effect="x is 1 in the exact run, too")


def test_the_table_has_a_row_for_each_setting_without_loading() -> None:
    lines = report(row("exact"), TRIED, SAME).lines()
    assert lines[0] == "compared    64x64, by demo in 30 steps, seed 42, on cpu (a CPU), 2 ranks"
    head = ["setting", "text", "s", "denoise", "s", "decode", "s", "evaluations", "speed-up"]
    assert lines[1].split() == [*head, "peak", "GiB", "PSNR", "dB", "SSIM", "latents"]
    assert lines[2].split() == ["exact", "0.25", "2.00", "0.75", "50", "1.00", "-", "-", "-", "-"]
    assert lines[3].split() == ["ab2-15", "0.25", "2.00", "0.75", "28", "1.50", "0.50", "21.25", "0.8750", "12.34%"]
    assert lines[4].endswith("0.00%   without effect")
    assert len({len(line) for line in lines[1:4]}) == 1
    assert lines[5:] == [
        "",
        "x=1: without effect: x is 1 in the exact run, too",
        "left out    euler-30: 50 evaluations, and the exact run takes 50",
        "wrote       a.svg",
    ]


def test_noise_is_named_by_what_cannot_be_faster() -> None:
    faster = row("x=1", speedup=1.2, psnr_db=99.0, latents_error=0.0, without_effect="why")
    assert any("differs by 20% in speed: so much is noise" in line for line in report(row("exact"), faster).lines())
    assert not any("is noise" in line for line in report(row("exact"), SAME).lines())


def test_a_small_error_keeps_its_digits() -> None:
    assert report(row("exact"), row("x", latents_error=1.5e-6)).lines()[3].endswith("1.5e-06")


def test_a_long_name_keeps_the_table_narrow() -> None:
    lines = report(row("exact"), row("a.b=" + "1" * 200)).lines()
    assert lines[3].startswith("a.b=111")
    assert len(lines[3]) < 200


def test_the_chart_has_every_setting_at_its_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    cached = row("x=$1$", psnr_db=99.0, ssim=1.0, latents_error=1e-7)
    report(row("exact"), TRIED, cached, row("euler", without_effect="why")).write_plot(str(path), replace=False)
    text = "".join(ElementTree.parse(path).getroot().itertext())
    assert "ab2-15 (1.50 times as fast)" in text
    assert "x=$1$ (1.00 times as fast, the same frames)" in text
    assert "euler" not in text
    report(row("exact")).write_plot(str(path), replace=True)
    assert path.stat().st_size > 0


def test_the_document_has_all_of_it() -> None:
    document = report(row("exact"), TRIED).to_json()
    assert document["schema"] == "osora.bench-generate/1"
    assert [each["name"] for each in document["settings"]] == ["exact", "ab2-15"]
    assert document["settings"][1]["stages_s"]["load"] == 9.0
