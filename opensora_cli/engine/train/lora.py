"""LoRA adapters (Hu et al. 2021) for linear layers in the transformer's blocks, made with PEFT."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.checkpoint.formats.peft import CONFIG_FILE, WEIGHTS_FILE, require_peft
from opensora_cli.checkpoint.lora import Adapter
from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.files import write_json_atomic
from opensora_cli.engine.components.loras import open_fitting
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.train_sections import LoraSettings, LoraTarget

_ADAPTER = "default"
CRITIC = "critic"
"""Name of the second adapter, which judges the first one in training and is not exported."""
_PREFIX = "base_model.model."


def add_lora(transformer: MMDiT, settings: LoraSettings, *, seed: int, has_critic: bool = False) -> None:
    """Add an adapter in float32 to linear layers of the blocks, in place, and freeze all other weights.

    Call this before sharding. The layer `x` gets `x.lora_A.default` and `x.lora_B.default`, and its own weights move to
    `x.base_layer`. The first weights are those of `first_adapter`. With `has_critic` there is a second adapter of the
    same size. Raises HardwareError if PEFT is not installed.
    """
    device = next(transformer.parameters()).device
    peft, config = require_peft(), _config(transformer.config, settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        for adapter in (CRITIC, _ADAPTER) if has_critic else (_ADAPTER,):
            # On the meta device, where PEFT computes no first weights of its own.
            peft.inject_adapter_in_model(config, transformer, adapter_name=adapter, low_cpu_mem_usage=True)
    for name, weight in transformer.named_parameters():
        weight.requires_grad_(_is_of_adapter(name))
        if weight.requires_grad:
            weight.data = weight.data.float()
    if device.type != "meta":
        for name, first in first_adapter(transformer, seed=seed):
            path, _, key = name.rpartition(".")
            setattr(transformer.get_submodule(path), key, nn.Parameter(first.to(device)))


@contextmanager
def using_adapter(transformer: nn.Module, name: str | None) -> Iterator[None]:
    """Evaluate the layers of a transformer with this adapter alone inside the block; None means with no adapter."""
    layers: list[Any] = [layer for layer in transformer.modules() if hasattr(layer, "base_layer")]
    # PEFT's own switches would also freeze adapters, whose gradients come after the block.
    for layer in layers:
        layer._disable_adapters, layer._active_adapter = name is None, [name or _ADAPTER]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters, layer._active_adapter = False, [_ADAPTER]


def first_adapter(transformer: MMDiT, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the first weights of an adapter by name: as in PEFT, one matrix is random, and the other is zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in transformer.named_parameters():
        if not _is_of_adapter(name):
            continue
        first = torch.zeros(weight.shape, dtype=torch.float32, device="cpu")
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator)
        yield name, first


def open_first_adapter(outline: MMDiT, settings: LoraSettings) -> Adapter:
    """Open the adapter `lora.init`. Raises RequestError if its rank, scale or layers are not those of `settings`."""
    assert settings.init is not None
    adapter = open_fitting(Path(settings.init), outline)
    layers = {name.removesuffix(".weight"): updates for name, updates in adapter.updates.items()}
    found = [update for updates in layers.values() for update in updates]
    ranks = {update.a.shape[0] for update in found}
    alphas = {f"{update.scale * update.a.shape[0]:.5g}" for update in found}
    targets = [target for target in LoraTarget if any(_target_of(path) is target for path in layers)]
    alpha = min(ranks, default=settings.rank) if settings.alpha is None else settings.alpha
    in_order = [target for target in LoraTarget if target in settings.targets]
    own = {"rank": ",".join(map(str, ranks)), "alpha": ",".join(alphas), "targets": ",".join(targets)}
    asked = {"rank": f"{settings.rank}", "alpha": f"{alpha:.5g}", "targets": ",".join(in_order)}
    wrong = [name for name in own if own[name] != asked[name]]
    if wrong:
        differences = "; ".join(f"it has lora.{name}={own[name]}, not {asked[name]}" for name in wrong)
        raise RequestError(
            f"lora.init={settings.init} is another adapter than asked for: {differences}",
            hint=" ".join(f"--set lora.{name}={own[name]}" for name in wrong),
        )
    linears = {path for path, layer in outline.named_modules() if isinstance(layer, nn.Linear)}
    if len(found) != len(layers) or layers.keys() != {path for path in linears if _target_of(path) in targets}:
        raise RequestError(f"lora.init={settings.init} has not one update for each layer of {own['targets']}")
    return adapter


def read_adapter(adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of an adapter one at a time, with names as in `first_adapter`."""
    for name, (update,) in adapter.updates.items():
        for letter, factor in (("A", update.a), ("B", update.b)):
            yield f"{name.removesuffix('.weight')}.lora_{letter}.{_ADAPTER}.weight", factor.read().float()


def save_lora(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    config: MMDiTConfig,
    settings: LoraSettings,
    base: str | None,
    metadata: Mapping[str, str],
) -> None:
    """Write an adapter in PEFT's format, which `osora generate --lora` and `osora ckpt merge-lora` read.

    `weights` are whole, by their names after `add_lora`; other weights are skipped. `base` names the base model for
    readers. Raises OutputError if the adapter cannot be written.
    """
    peft_config = _config(config, settings)
    peft_config.inference_mode = True
    peft_config.base_model_name_or_path = base
    tensors = {
        _PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor
        for name, tensor in weights.items()
        if _is_of_adapter(name) and not is_of_critic(name)
    }
    write_weights(folder / WEIGHTS_FILE, tensors, dtype=torch.float32, metadata=metadata)
    fields = sorted(peft_config.to_dict().items())
    write_json_atomic(
        folder / CONFIG_FILE, {key: sorted(value) if isinstance(value, set) else value for key, value in fields}
    )


def _target_of(path: str) -> LoraTarget | None:
    """Return the target of a linear layer; None for layers outside of blocks, and for modulations."""
    owner, _, name = path.rpartition(".")
    if owner.endswith("_mlp"):
        return LoraTarget.MLP
    return LoraTarget(name) if name in list(LoraTarget) else None


def _config(config: MMDiTConfig, settings: LoraSettings) -> Any:
    return require_peft().LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank if settings.alpha is None else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=sorted(
            {
                linear.path
                for stack in repeated_blocks(config)
                for linear in stack.linears
                if _target_of(linear.path) in settings.targets
            }
        ),
        bias="none",
    )


def is_of_critic(name: str) -> bool:
    return name.endswith(f".{CRITIC}.weight")


def _is_of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
