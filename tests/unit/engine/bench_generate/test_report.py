"""The table of a comparison, and its document."""

from opensora_cli.engine.bench_generate import BenchedSetting, BenchGenerateReport


def row(name: str, **changes: object) -> BenchedSetting:
    stages = {"load": 9.0, "text": 0.25, "denoise": 2.0, "decode": 0.75}
    values: dict[str, object] = {
        "name": name,
        "changes": {},
        "stages_s": stages,
        "seconds": 3.0,
        "deviation_s": 0.5,
        "evaluations": 50,
        "speedup": 1.0,
        **dict.fromkeys(("peak_memory_gib", "psnr_db", "ssim", "latents_error")),
    }
    return BenchedSetting.model_validate(values | changes)


def report(*rows: BenchedSetting, repeats: int = 1) -> BenchGenerateReport:
    return BenchGenerateReport(
        of="64x64, by demo in 30 steps",
        prompt="sea",
        seed=42,
        device="cpu",
        device_name="a CPU",
        ranks=2,
        repeats=repeats,
        settings=rows,
        skipped={"euler-30": "50 evaluations; the exact run takes 50"},
    )


TRIED = row("ab2-15", evaluations=28, speedup=1.5, psnr_db=21.25, ssim=0.875, latents_error=0.1234, peak_memory_gib=0.5)


def test_the_table_has_a_row_for_each_setting_without_loading() -> None:
    lines = report(row("exact"), TRIED).lines()
    assert lines[0] == "compared    64x64, by demo in 30 steps, seed 42, on cpu (a CPU), 2 ranks"
    assert lines[1].split() == ["setting", "text", "s", "denoise", "s", "decode", "s", "total", "s"]
    assert lines[2].split() == ["exact", "0.25", "2.00", "0.75", "3.00"]
    assert lines[5].split() == ["setting", "evaluations", "speed-up", "peak", "GiB", "PSNR", "dB", "SSIM", "latents"]
    assert lines[6].split() == ["exact", "50", "1.00", "-", "-", "-", "-"]
    assert lines[7].split() == ["ab2-15", "28", "1.50", "0.50", "21.25", "0.8750", "12.34%"]
    assert max(map(len, lines)) <= 80
    assert lines[8:] == ["skipped     euler-30: 50 evaluations; the exact run takes 50"]


def test_repeated_runs_show_their_deviation_and_small_errors_their_digits() -> None:
    lines = report(row("exact", latents_error=1.5e-6), repeats=2).lines()
    assert lines[2].endswith("3.00 ±0.50")
    assert lines[5].endswith("1.5e-06")
