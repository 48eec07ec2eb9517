"""Documents that osora reads back: with any value of them replaced, they are read or refused in one line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from tiny_adapters import CONFIG, factors, write_adapter
from tiny_source import Colors

from opensora_cli.checkpoint.lora import open_adapter
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.shared_folder import recorded_hashes
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.core.reading import read_json_object
from opensora_cli.data.batches import ClipRequest
from opensora_cli.data.loading import BatchStream
from opensora_cli.engine.encode.clip_cache import ClipCache, is_cache_of
from opensora_cli.engine.generate.sample import open_latents
from opensora_cli.engine.train.checkpoints import read_running_states
from opensora_cli.engine.train.metrics import truncate_log
from opensora_cli.media.results import read_sidecar as read_described
from opensora_cli.models.registry import OPEN_SORA_V2
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes, missing_files
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import (
    SIDECAR_SCHEMA,
    GenerateRequest,
    SavedSettings,
    load_generate_settings,
    read_sidecar,
)
from opensora_cli.settings.train import TrainSettings, load_train_settings

_PLACE = "@replaced@"
VALUES = [
    *("7", "-1", "9223372036854775808", "1e400", "NaN", "1.5", "[]", "{}", '""', "null", "true", "[[]]", '[{"a": 1}]'),
    *('"../../x"', '"/etc/passwd"', r'"a\u0000b"', r'"\ud800"', '"\\u001b[2J"', json.dumps("x" * 100_000)),
    *("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "9" * 5000),
]
HASH = "0" * 64


def replaced(document: Any) -> Iterator[Any]:
    """Yield copies of a document in which one value, at any depth, is a placeholder."""
    items = document.items() if isinstance(document, dict) else enumerate(document[:3])
    for key, value in items:
        for inner in [_PLACE, *(replaced(value) if isinstance(value, dict | list) else ())]:
            copy = dict(document) if isinstance(document, dict) else list(document)
            copy[key] = inner
            yield copy


class Kind(NamedTuple):
    """A kind of document, and what reads it."""

    document: Any
    read: Callable[[Path], object]
    name: str
    write: Callable[[Path, str], object] = lambda path, text: path.write_text(text)


def _settings(values: dict[str, Any], source: str) -> object:
    saved = SavedSettings(source=source, values=values)
    return load_generate_settings(GenerateRequest(saved=saved), model=OPEN_SORA_V2)


def _write_latents(path: Path, text: str) -> None:
    values = json.loads(text)
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    save_file({"latents": torch.zeros(4, 1, 2, 2)}, path, metadata=metadata)


def _write_cache(path: Path, text: str) -> None:
    save_file({"a.b": torch.zeros(1)}, path, metadata={"osora.clips": text, "osora.identity": text})
    (path.parent / "cache.safetensors").write_bytes(path.read_bytes())


def _write_config(path: Path, text: str) -> None:
    write_adapter(path.parent, factors("proj", 4, 4))
    path.write_text(text)


def _read_cache(path: Path) -> None:
    cache = ClipCache(path.parent)
    request = ClipRequest(
        path="a", caption="a", motion_score=None, start=0, interval=1, num_frames=1, height=8, width=8, fps=1
    )
    cache.names(request, file=(1, 2))
    is_cache_of(path.parent, CLIPS)


def _open_index(path: Path) -> None:
    missing_files(path.parent, vocabularies=[["config.json"]])
    open_checkpoint(path.parent)


def _sampler(path: Path) -> None:
    stream = BatchStream(Colors(), micro_batches=2, workers=0, prefetch=1, reporter=SilentReporter())
    stream.load_state_dict(read_json_object(path))
    stream.next()


CLIPS: dict[str, Any] = {"k": {"names": ["b"], "file": [1, 2]}}
RUNNING = {
    "schema": "osora.running-states/2",
    "epoch": 0,
    "global_step": 3,
    "micro_batches": 2,
    "threads": 1,
    "skipped_in_a_row": 0,
    "done": ["samples"],
    "attention": {"backend": "sdpa"},
    "sampler": {"handed_out": 1},
    "sha256": {"model/a.safetensors": HASH},
}
SIDECAR = {
    "schema": SIDECAR_SCHEMA,
    "file": "a.png",
    "bytes": 1,
    "settings": GenerateSettings(prompt="sea").model_dump(mode="json"),
}
LATENTS = {"schema": "osora.latents/1", "settings": {"prompt": "sea"}, "request_sha256": HASH, "steps_done": "3"}

KINDS = {
    "running states": Kind(RUNNING, lambda path: read_running_states(path.parent), "running_states.json"),
    "recorded hashes": Kind(RUNNING, lambda path: recorded_hashes(path.parent), "running_states.json"),
    "sampler": Kind({"epoch": 0, "position": 0, "number": 0, "data": "a"}, _sampler, "sampler.json"),
    "log": Kind({"step": 1}, lambda path: truncate_log(path.parent, step=1), "log.jsonl"),
    "settings of a run": Kind(
        TrainSettings(output="a", target="vae").model_dump(mode="json"),
        lambda path: load_train_settings(
            config=None, overrides={"output": Given("a", "--set")}, saved=path, environment={}
        ),
        "settings.json",
    ),
    "sidecar": Kind(
        SIDECAR, lambda path: (read_described(path), _settings(dict(read_sidecar(path).values), str(path))), "a.json"
    ),
    "latents": Kind(
        LATENTS,
        lambda path: _settings(dict(open_latents(path).settings), str(path)),
        "a.latents.safetensors",
        _write_latents,
    ),
    "index of shards": Kind(
        {"metadata": {"total_size": 1, "sha256": {"a.safetensors": HASH}}, "weight_map": {"a": "a.safetensors"}},
        _open_index,
        "model.safetensors.index.json",
    ),
    "configuration of an adapter": Kind(
        CONFIG | {"rank_pattern": {"proj": 2}},
        lambda path: open_adapter(path.parent),
        "adapter_config.json",
        _write_config,
    ),
    "configuration of T5": Kind(
        {"d_model": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "d_ff": 8, "vocab_size": 9},
        lambda path: (T5Sizes.of(path.parent), ClipSizes.of(path.parent)),
        "config.json",
    ),
    "clips of a cache": Kind(CLIPS, _read_cache, "clips-a.safetensors", _write_cache),
}  # fmt: skip


_IGNORED = ("log",)
"""Lines that are made again where they are wrong."""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_value_of_a_document_is_read_or_refused(tmp_path: Path, kind: str, every: bool) -> None:
    document, read, name, write = KINDS[kind]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(document))
    if kind != "index of shards":  # its shards are not there
        read(path)
    copies = list(replaced(document))
    refusals: list[str] = []
    step = max(1, len(copies) * len(VALUES) // (1000 if every else 60))
    for number, (copy, value) in enumerate((copy, value) for copy in copies for value in VALUES):
        if number % step:
            continue
        try:
            write(path, json.dumps(copy).replace(f'"{_PLACE}"', value))
        except (ValueError, RecursionError):
            continue  # no metadata of a tensor file
        try:
            read(path)
        except (RequestError, FileProblem) as error:
            refusals.append(f"{error.message} {error.hint}")
    assert refusals or kind in _IGNORED
    assert not any("weights_only=False" in refusal for refusal in refusals)
