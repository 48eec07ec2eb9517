"""What configurations of the reference implementation for training and for sampling have in common."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.settings.files import read_yaml
from opensora_cli.settings.python_config import read_python_config

_KINDS = {"hunyuan_vae": "hunyuan", "dc_ae": "dc_ae", "autoencoder_2d": "flux_ae"}
_TILINGS = {"use_spatial_tiling": "vae.spatial_tiling", "use_temporal_tiling": "vae.temporal_tiling"}
_OF_KIND = {
    "hunyuan": {
        name: f"vae.{name}"
        for name in (
            *("layers_per_block", "latent_channels", "block_out_channels", "scale_factor", "shift_factor"),
            *("time_compression_ratio", "spatial_compression_ratio"),
        )
    },
    "dc_ae": {
        name: f"vae.dc_ae.{name}"
        for name in ("scaling_factor", "spatial_tile_size", "temporal_tile_size", "tile_overlap_factor")
    },
    "flux_ae": {
        name: f"vae.flux_ae.{name}"
        for name in ("ch", "ch_mult", "num_res_blocks", "z_channels", "scale_factor", "shift_factor")
    },
}
# Values that are so here in any case.
_USUAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("in_channels", "out_channels", "out_ch"), (3,)),
    # Neither the 2D autoencoder nor its weights depend on it.
    "resolution": (256,),
    **{f"{part}_{what}": (False,) for part in ("encoder", "decoder") for what in ("add_residual", "slice_t")},
    "dropout": (0,),
}
TRANSFORMER_SIZES = {
    f"model.{key}": f"model.{key}"
    for key in (
        *("in_channels", "vec_in_dim", "context_in_dim", "hidden_size", "mlp_ratio", "num_heads", "depth"),
        *("depth_single_blocks", "axes_dim", "theta", "qkv_bias", "guidance_embed", "patch_size"),
    )
}
"""Of the same name, meaning and form in both."""


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """A configuration in osora's terms."""

    sections: dict[str, Any]
    """Nested, as a YAML file has them."""
    left: tuple[str, ...]
    """A line for each setting that was not carried over: its name, value, and why."""


def read_settings(
    path: Path, read_reference: Callable[[Path], ReferenceConfig], report: Callable[[str], None]
) -> Mapping[str, object]:
    """Return the sections in a YAML file, or in a `.py` file of the reference implementation.

    `read_reference` reads the latter, and `report` gets a line for each setting of it that has no place here. Raises
    FileProblem as these do.
    """
    if path.suffix != ".py":
        return read_yaml(path)
    found = read_reference(path)
    for line in found.left:
        report(f"{path}: not carried over: {line}")
    return found.sections


class ReferenceValues:
    """The settings of a `.py` file by dotted names, of which some are taken.
    Raises FileProblem if the file is missing, or no such configuration.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_python_config(path)
        self._taken: set[str] = set()
        self._notes: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the file has it."""
        return self._find(name) is not _NOTHING

    def peek(self, name: str, default: Any = None) -> Any:
        """Return its value."""
        value = self._find(name)
        return default if value is _NOTHING else value

    def take(self, name: str, default: Any = None) -> Any:
        """Return its value, which is not listed as left then, nor what is below it."""
        self._taken.add(name)
        return self.peek(name, default)

    def take_text(self, name: str) -> str | None:
        """Return its value, a text or None, as `take` does. Raises FileProblem if it is anything else."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise FileProblem(f"{self._path}: {name}={value!r:.80} must be a text")
        return value

    def take_count(self, name: str) -> int:
        """Return its value, a number from 1 on, or 1, as `take` does. Raises FileProblem if it is anything else."""
        value = self.take(name, 1)
        if type(value) is not int or value < 1:
            raise FileProblem(f"{self._path}: {name}={value!r:.80} must be a number from 1 on")
        return value

    def note(self, line: str) -> None:
        """List a line of one's own."""
        self._notes.append(line)

    def left(self, reasons: Mapping[str, str]) -> Iterator[str]:
        """Yield a line for each setting that was not taken: its name, value, and why."""
        yield from self._notes
        for name, value in self._leaves(self._values, ""):
            reason = next((why for start, why in reasons.items() if f"{name}.".startswith(f"{start}.")), None)
            yield f"{name}={_shown(value)}: {reason or 'has no counterpart'}"

    def _leaves(self, values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            name = f"{prefix}{key}"
            if name in self._taken:
                continue
            if isinstance(value, dict) and value and all(isinstance(below, str) for below in value):
                yield from self._leaves(value, f"{name}.")
            else:
                yield name, value

    def _find(self, name: str) -> Any:
        value: Any = self._values
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                return _NOTHING
            value = value[key]
        return value


_NOTHING = object()


_NOTHING = object()


def is_for_training(path: Path) -> bool:
    """Whether a `.py` file of the reference implementation is for training; errors as `read_python_config`."""
    return "sampling_option" not in read_python_config(path)


def autoencoder(values: ReferenceValues, section: str, path: Path) -> dict[str, object]:
    """Return the settings of the autoencoder in a section, but for its weights.
    Raises FileProblem if it is of an unknown kind.
    """
    theirs = values.take_text(f"{section}.type")
    if theirs is None or theirs not in _KINDS:
        raise FileProblem(
            f"{path}: {section}.type={theirs} is no autoencoder that osora knows",
            hint=f"these are: {', '.join(_KINDS)}",
        )
    kind = _KINDS[theirs]
    found: dict[str, object] = {"vae.kind": kind}
    for name, ours in {**_TILINGS, **_OF_KIND[kind]}.items():
        if values.has(f"{section}.{name}"):
            found[ours] = values.take(f"{section}.{name}")
    drop_implied(values, {f"{section}.{name}": usual for name, usual in _USUAL.items()})
    return found


def plugin_degrees(values: ReferenceValues) -> dict[str, int]:
    """Return over how many devices `plugin_config` splits a model, by setting; none that is 1."""
    tensor, sequence = values.take_count("plugin_config.tp_size"), values.take_count("plugin_config.sp_size")
    if values.peek("plugin_config.pp_size") == 1:
        values.take("plugin_config.pp_size")
    values.take("plugin_config.enable_sequence_parallelism")
    scheme = values.take("plugin_config.sequence_parallelism_mode")
    degrees = {
        "parallel.tensor_parallel_degree": tensor,
        f"parallel.{'ring' if scheme == 'ring_attn' else 'ulysses'}_degree": sequence,
    }
    return {name: degree for name, degree in degrees.items() if degree > 1}


def drop_implied(values: ReferenceValues, implied: Mapping[str, tuple[object, ...]]) -> None:
    """Take the settings that have a value which is so here in any case."""
    for name, usual in implied.items():
        if values.has(name) and values.peek(name) in usual:
            values.take(name)


def carried_over(
    values: ReferenceValues,
    found: Mapping[str, object],
    *,
    same: Mapping[str, str],
    implied: Mapping[str, tuple[object, ...]],
    reasons: Mapping[str, str],
) -> ReferenceConfig:
    """Return `found` and what is of the `same` meaning and form; the rest is left, unless it is `implied`."""
    complete = dict(found)
    for theirs, ours in same.items():
        if values.has(theirs):
            complete[ours] = values.take(theirs)
    drop_implied(values, implied)
    return ReferenceConfig(_nested(complete), tuple(values.left(reasons)))


def _nested(found: Mapping[str, object]) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for key, value in found.items():
        *path, name = key.split(".")
        place = sections
        for section in path:
            place = place.setdefault(section, {})
        place[name] = value
    return sections


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
