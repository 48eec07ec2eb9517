"""Weights by their name on the Hugging Face Hub."""

from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_SUBFOLDERS = ["*/*"]


def fetch_from_hub(name: str, *, cache_dir: str | Path | None = None) -> Path:
    """Return the file or folder in the Hub's cache that `name` means, downloading what is missing of it.

    Args:
        name: `owner/repository` for the safetensors files of a repository, those in its subfolders left out; or
            `owner/repository/path/of/file`.
        cache_dir: where files of the Hub are kept; None is the usual place.

    Raises:
        CheckpointError: no such repository or file, no access to it, or no connection.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if owner in ("", ".", "..", "~") or not repository:
        raise CheckpointError(f"{name} does not exist")
    repo = f"{owner}/{repository}"
    try:
        if file:
            return Path(hf_hub_download(repo, file, cache_dir=cache_dir))
        folder = snapshot_download(repo, cache_dir=cache_dir, allow_patterns=_WEIGHTS, ignore_patterns=_SUBFOLDERS)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{name} does not exist here, and cannot be fetched from the Hugging Face Hub: {reason}"
        ) from error
    if not Path(str(folder)).is_dir():
        raise CheckpointError(f"{name} has no safetensors files", hint=f"name a file of it: {name}/FILE")
    return Path(str(folder))
