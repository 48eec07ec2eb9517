"""Downloading from a Hub: all that is needed, nothing twice, and nothing that is not what the Hub says."""

import hashlib
import random
from pathlib import Path

import huggingface_hub
import pytest
from fake_hub import FakeRepo, connect, serving
from hostile_files import HUB_ANSWERS, NO_OBJECTS
from huggingface_hub import close_session

from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.ckpt.download import download, downloaded_sha256, plan_download
from opensora_cli.engine.components.weights import find_released
from opensora_cli.models.registry import WeightNames
from opensora_cli.settings.tools import DownloadSettings

MAIN = "hpcai-tech/Open-Sora-v2"
FLUX = "black-forest-labs/FLUX.1-dev"
T5 = "google/t5-v1_1-xxl"
CLIP = "openai/clip-vit-large-patch14"
BIG = "Open_Sora_v2.safetensors"

CONTENT = random.Random(5).randbytes(400_000)
TEXT_FILES = {
    f"{T5}/config.json": b"{}",
    f"{T5}/model-00001-of-00001.safetensors": b"t5",
    f"{T5}/model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}',
    f"{T5}/pytorch_model.bin": b"t5 again",
    f"{T5}/pytorch_model.bin.index.json": b"{}",
    f"{T5}/tf_model.h5": b"and again",
    f"{T5}/spiece.model": b"vocabulary",
    f"{T5}/tokenizer_config.json": b"{}",
    f"{CLIP}/config.json": b"{}",
    f"{CLIP}/pytorch_model.bin": b"only form",
    f"{CLIP}/vocab.json": b"{}",
    f"{CLIP}/merges.txt": b"",
    f"{CLIP}/tokenizer.json": b"{}",
}
SUPERFLUOUS = {f"{T5}/{name}" for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5")}
WANTED = {BIG, "hunyuan_vae.safetensors", *TEXT_FILES} - SUPERFLUOUS


@pytest.fixture
def hub(monkeypatch):
    with serving() as server:
        files = {"README.md": b"no", BIG: CONTENT, "hunyuan_vae.safetensors": b"vae", "other.safetensors": b"no"}
        server.repos[MAIN] = FakeRepo(files | TEXT_FILES)
        connect(server, monkeypatch)
        yield server


def settings(folder: Path, *, preset: str = "open-sora-v2", overwrite: bool = False) -> DownloadSettings:
    return DownloadSettings.model_validate({"preset": preset, "to": str(folder), "overwrite": overwrite})


def files_in(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if path.parts[0] != ".cache"}


class Stopping(SilentReporter):
    """Presses Ctrl-C when so many bytes have come."""

    def __init__(self, after: int) -> None:
        self._left = after

    def advance(self, amount: int = 1) -> None:
        self._left -= amount
        if self._left <= 0:
            raise KeyboardInterrupt


def test_generating_finds_what_was_downloaded(hub, tmp_path):
    result = download(settings(tmp_path))

    assert files_in(tmp_path) == WANTED
    assert (tmp_path / BIG).read_bytes() == CONTENT
    assert find_released(WeightNames(), str(tmp_path)).complete
    assert result.bytes_to_fetch == 0
    hub.transfers.clear()
    assert download(settings(tmp_path)).bytes_to_fetch == 0
    assert hub.transfers == []


def test_sizes_and_licences_are_printed_before_anything_is_fetched(hub, tmp_path):
    plan = plan_download(settings(tmp_path))

    assert hub.transfers == []
    assert list(tmp_path.iterdir()) == []
    assert plan.lines()[0] == f"{MAIN}: licence apache-2.0"
    assert f"    400.0 kB  {BIG}" in plan.lines()
    assert plan.bytes_to_fetch == sum(len(hub.repos[MAIN].files[name]) for name in WANTED)
    first = plan.to_json()["files"][0]
    assert (first["name"], first["bytes"], first["bytes_here"]) == (BIG, len(CONTENT), 0)
    assert first["hash"] == hashlib.sha256(CONTENT).hexdigest()


def test_files_from_elsewhere_are_checked_and_kept(hub, tmp_path):
    (tmp_path / BIG).write_bytes(CONTENT)
    assert f"    400.0 kB  {BIG} (400.0 kB here)" in plan_download(settings(tmp_path)).lines()
    download(settings(tmp_path))
    assert BIG not in dict(hub.transfers)
    assert downloaded_sha256(tmp_path / BIG) == hashlib.sha256(CONTENT).hexdigest()


@pytest.mark.parametrize("content", [bytes(len(CONTENT)), b"short"], ids=["same size", "other size"])
def test_other_files_are_not_lost(content, hub, tmp_path):
    (tmp_path / BIG).write_bytes(content)
    with pytest.raises(OutputError, match=f"other files .*{BIG}"):
        download(settings(tmp_path))
    assert hub.transfers == []
    assert (tmp_path / BIG).read_bytes() == content
    download(settings(tmp_path, overwrite=True))
    assert (tmp_path / BIG).read_bytes() == CONTENT


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_an_interrupted_download_continues(knows_ranges, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.knows_ranges = knows_ranges
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        download(settings(tmp_path), reporter=Stopping(after=150_000))
    assert not (tmp_path / BIG).exists()
    begun = plan_download(settings(tmp_path)).files[0]
    assert 140_000 <= begun.bytes_here < len(CONTENT)
    hub.transfers.clear()

    download(settings(tmp_path))
    assert (tmp_path / BIG).read_bytes() == CONTENT
    assert dict(hub.transfers)[BIG] == (begun.bytes_here if knows_ranges else 0)
    assert files_in(tmp_path) == WANTED


@pytest.mark.parametrize("name", [BIG, f"{T5}/config.json"])
def test_wrong_content_is_refused_and_removed(name, hub, tmp_path):
    hub.sent_instead[name] = bytes(len(hub.repos[MAIN].files[name]))
    with pytest.raises(CheckpointError, match=f"{name} arrived with another hash"):
        download(settings(tmp_path))
    assert not (tmp_path / name).exists()
    assert list(tmp_path.rglob("*.part")) == []
    hub.sent_instead.clear()
    download(settings(tmp_path))
    assert (tmp_path / name).read_bytes() == hub.repos[MAIN].files[name]


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in HUB_ANSWERS.items()])
def test_an_answer_of_another_form_is_refused_in_one_line(hub, tmp_path, change):
    hub.changes = change
    with pytest.raises(CheckpointError) as caught:
        plan_download(settings(tmp_path))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 600
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("listing", NO_OBJECTS)
def test_what_is_no_object_is_not_the_hub(hub, tmp_path, listing):
    hub.listing = listing
    with pytest.raises(CheckpointError, match=f"{hub.endpoint} gives no usable answer"):
        plan_download(settings(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://me:secret@127.0.0.1:1"),
        ("SSL_CERT_FILE", "/nonexistent.pem"),
        ("https_proxy", "ftp://me:secret@x"),
        ("http_proxy", "http://[::1"),
    ],
)
def test_wrong_proxies_and_certificates_are_named(hub, tmp_path, monkeypatch, name, value):
    for other in ("all_proxy", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.delenv(other.upper(), raising=False)
    monkeypatch.setenv(name, value)
    close_session()
    try:
        with pytest.raises(CheckpointError, match="gives no usable answer: ") as caught:
            plan_download(settings(tmp_path))
    finally:
        close_session()
    assert "secret" not in caught.value.message
    assert "HTTPS_PROXY and SSL_CERT_FILE" in caught.value.hint


@pytest.mark.parametrize(
    "endpoint", ["http://[::1", "ftp://x", "", "http://x:99999", "http://x?a", "http://a\x1b[31mb"]
)
def test_an_endpoint_that_is_no_address_is_refused_in_one_line(monkeypatch, tmp_path, endpoint):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    with pytest.raises(CheckpointError) as caught:
        plan_download(settings(tmp_path))
    assert caught.value.message.isprintable()
    assert "HF_ENDPOINT" in str(caught.value.hint)


def test_the_password_of_an_endpoint_is_not_shown(hub, tmp_path, monkeypatch):
    private = hub.endpoint.replace("://", "://user:pass@word@")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", private)
    hub.listing = b"[]"
    with pytest.raises(CheckpointError) as caught:
        plan_download(settings(tmp_path))
    assert f"{MAIN}: http://<hidden>@127.0.0.1:" in caught.value.message
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:pass@word@127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"http://<hidden>@127\.0\.0\.1:9 gives no usable answer") as caught:
        plan_download(settings(tmp_path))
    assert "word" not in f"{caught.value.message} {caught.value.hint}"
    assert "HF_ENDPOINT" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("token", "hint"),
    [("", "hf auth login, or HF_TOKEN"), ("hf_other", "with the account of your token")],
)
def test_hints_for_gated_repositories_explain_access(token, hint, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.repos[FLUX] = FakeRepo({"flux1-dev.safetensors": b"f", "ae.safetensors": b"a"}, licence="other", gated=True)
    request = settings(tmp_path, preset="flux1-dev")
    said = f"{FLUX}: licence other, given only to those who have accepted its terms: needs a token"
    assert plan_download(request).lines()[0] == said
    with pytest.raises(CheckpointError, match="only given to people who have accepted its terms") as caught:
        download(request)
    assert hint in str(caught.value.hint)
    assert f"{hub.endpoint}/{FLUX}" in str(caught.value.hint)
    assert files_in(tmp_path) == set()


def test_a_hub_that_lacks_what_is_needed_is_refused(hub, tmp_path):
    with pytest.raises(CheckpointError, match=f"{FLUX} is not at http"):
        plan_download(settings(tmp_path, preset="flux1-dev"))
    for name in ("hunyuan_vae.safetensors", f"{CLIP}/config.json"):
        del hub.repos[MAIN].files[name]
    with pytest.raises(CheckpointError, match=f"has no hunyuan_vae.safetensors, {CLIP}/config.json"):
        plan_download(settings(tmp_path))
    hub.speaks_html = True
    with pytest.raises(CheckpointError, match=r"http.* gives no usable answer"):
        plan_download(settings(tmp_path))


def test_offline_nothing_is_requested(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the machine is offline") as caught:
        download(settings(tmp_path))
    assert "osora ckpt verify" in str(caught.value.hint)
    assert hub.requests == []


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "http://127.0.0.1:1/x", "http://[", "/" + "x" * 100_000, "", "\x7f", "gopher://x/"],
)
def test_a_redirection_that_leads_nowhere_leaves_nothing(hub, tmp_path, location):
    hub.locations[BIG] = location
    with pytest.raises(CheckpointError) as caught:
        download(settings(tmp_path))
    assert caught.value.message.startswith(f"{MAIN}: ")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 600
    assert files_in(tmp_path) <= WANTED - {BIG}
