"""Files in the folders of text encoders. Importing this module imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.reading import read_json_object, reading, stays_inside

T5_VOCABULARIES = (("spiece.model",), ("tokenizer.json",))
CLIP_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"))

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def missing_files(folder: Path, *, vocabularies: Sequence[Sequence[str]]) -> list[str]:
    """Return the missing files of a transformers folder, without reading weights. One of `vocabularies` suffices."""
    missing = [] if (folder / "config.json").is_file() else [str(folder / "config.json")]
    if not any((folder / name).is_file() for name in _WEIGHT_FILES):
        indexes = [folder / name for name in _INDEX_FILES if (folder / name).is_file()]
        missing += _missing_shards(indexes[0]) if indexes else [str(folder / _WEIGHT_FILES[0])]
    if not any(all((folder / name).is_file() for name in names) for names in vocabularies):
        choices = " or ".join(" + ".join(names) for names in vocabularies)
        missing.append(str(folder / choices))
    return missing


def require_files(folder: Path, *, vocabularies: Sequence[Sequence[str]]) -> None:
    """Raise CheckpointError that names every file that `folder` lacks."""
    missing = missing_files(folder, vocabularies=vocabularies)
    if missing:
        state = "is incomplete" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"text encoder folder {folder} {state}; missing: {', '.join(missing)}")


def _missing_shards(index: Path) -> list[str]:
    places = read_json_object(index, problem=CheckpointError, hint="fetch it again").get("weight_map")
    if not isinstance(places, dict) or not all(stays_inside(shard) for shard in places.values()):
        raise CheckpointError(f"{index} is no index of weight files in its folder", hint="fetch it again")
    shards = sorted(set(places.values()))
    with reading(index.parent, problem=CheckpointError):
        return [str(index.parent / shard) for shard in shards if not (index.parent / shard).is_file()]
