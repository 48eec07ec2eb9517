"""Downloads from a hub that breaks off, refuses, lies, and names files that lie elsewhere."""

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from fake_hub import FakeHub, FakeRepo, serving
from hostile import judge
from hostile.breaking import HUB
from hostile.inputs import Inputs
from hostile.judge import Fault
from hostile.sandbox import Folder, Outcome
from hostile.trial import Case

_MAIN, _T5, _CLIP = "hpcai-tech/Open-Sora-v2", "google/t5-v1_1-xxl", "openai/clip-vit-large-patch14"
_BIG = "Open_Sora_v2.safetensors"


def _weights(count: int) -> bytes:
    """Return a safetensors file of so many random bytes."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    return struct.pack("<Q", len(header)) + header + random.Random(5).randbytes(count)


def _archive() -> bytes:
    """Return a file of the form of torch.save's."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("archive/data.pkl", b"}.")
    return content.getvalue()


_FILES: Mapping[str, bytes] = {
    _BIG: _weights(200_000),
    "hunyuan_vae.safetensors": _weights(3000),
    f"{_T5}/config.json": b"{}",
    f"{_T5}/model-00001-of-00001.safetensors": _weights(100),
    f"{_T5}/model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}',
    f"{_T5}/spiece.model": b"vocabulary",
    f"{_T5}/tokenizer_config.json": b"{}",
    f"{_CLIP}/config.json": b"{}",
    f"{_CLIP}/pytorch_model.bin": _archive(),
    f"{_CLIP}/vocab.json": b"{}",
    f"{_CLIP}/merges.txt": b"",
    f"{_CLIP}/tokenizer.json": b"{}",
}


def hub_case(number: int, inputs: Inputs) -> Case:
    """Return the case of a number. Its hub runs from its preparation until its files have been checked."""
    rng = random.Random(number)
    hub_runs = ExitStack()
    listed: dict[str, bytes] = {}
    environment: dict[str, str] = {"HF_HUB_OFFLINE": "0"}

    argv = ("ckpt", "download", "open-sora-v2", "--to", "got", *(["--overwrite"] if rng.random() < 0.3 else []))
    argv += ("--dry-run",) if rng.random() < 0.1 else ()

    def prepare(folder: Folder) -> None:
        hub = hub_runs.enter_context(serving())
        hub.repos[_MAIN] = FakeRepo(dict(_FILES))
        for _ in range(rng.choice((1, 1, 2, 3))):
            rng.choice(_TRICKS)(hub, rng)
        listed.update(hub.repos[_MAIN].files)
        environment[HUB] = hub.endpoint
        if rng.random() < 0.3:
            name = rng.choice(list(_FILES))
            (folder.work / "got" / name).parent.mkdir(parents=True)
            (folder.work / "got" / name).write_bytes(rng.choice((b"", b"of the user", _FILES[name][:100])))

    def check(folder: Folder, outcome: Outcome) -> Iterable[Fault]:
        hub_runs.close()
        got = folder.work / "got"
        for path in got.rglob("*"):
            name = path.relative_to(got).as_posix()
            is_result = (
                outcome.code == 0 and "--dry-run" not in argv and path.is_file() and not name.startswith(".cache/")
            )
            if is_result and listed.get(name) != path.read_bytes():
                yield Fault(judge.HALF, f"{name} is not what the hub lists")

    may_change = ("work/got",) if "--overwrite" in argv else ()
    return Case(
        f"hub {number}",
        argv,
        prepare,
        check=check,
        environment=environment,
        may_change=may_change,
        patch="hostile.breaking:ask_hub",
        may_keep=("work/got/",),
    )


def _breaks_off(hub: FakeHub, rng: random.Random) -> None:
    name = rng.choice(list(_FILES))
    hub.breaks[name] = [rng.randrange(len(_FILES[name]) + 1) for _ in range(rng.choice((1, 2, 20)))]


def _refuses(hub: FakeHub, rng: random.Random) -> None:
    hub.statuses[rng.choice(list(_FILES))] = [rng.choice((401, 403, 404, 416, 429, 500, 503))] * rng.choice((1, 2, 20))


def _sends_other(hub: FakeHub, rng: random.Random) -> None:
    name = rng.choice(list(_FILES))
    content = _FILES[name]
    lies = (b"", content[:-1], content + b"x", bytes(len(content)), b"<html>log in</html>")
    hub.sent_instead[name] = rng.choice(lies)


def _knows_little(hub: FakeHub, rng: random.Random) -> None:
    hub.knows_ranges, hub.lists_sizes = rng.random() < 0.5, rng.random() < 0.5


def _speaks_html(hub: FakeHub, rng: random.Random) -> None:
    hub.speaks_html = True


def _steers_the_terminal(hub: FakeHub, rng: random.Random) -> None:
    hub.listing_headers = {"X-HF-Warning": "topic; \x1b[2J\x9b31m"}


def _is_gated(hub: FakeHub, rng: random.Random) -> None:
    hub.repos[_MAIN].gated = True


def _lacks(hub: FakeHub, rng: random.Random) -> None:
    hub.repos[_MAIN].files.pop(rng.choice(list(_FILES)), None)


def _is_gone(hub: FakeHub, rng: random.Random) -> None:
    hub.repos[_MAIN].files.clear()


def _names_places_elsewhere(hub: FakeHub, rng: random.Random) -> None:
    folder = rng.choice((f"{_T5}/", f"{_CLIP}/", ""))
    places = (
        "../../../pwned",
        "/tmp/pwned",
        "a/../../pwned",
        ".",
        "..",
        "",
        "x\0y",
        "x" * 300,
        "a\\..\\pwned",
        "é\u202e",
    )
    ending, content = rng.choice((("", b"pwned"), (".json", b"{}"), (".safetensors", _weights(8))))
    hub.repos[_MAIN].files[folder + rng.choice(places) + ending] = content


_TRICKS: tuple[Callable[[FakeHub, random.Random], None], ...] = (
    _breaks_off,
    _refuses,
    _sends_other,
    _knows_little,
    _speaks_html,
    _steers_the_terminal,
    _is_gated,
    _lacks,
    _is_gone,
    _names_places_elsewhere,
)
