"""Stand-ins for libraries of attention, with the signatures that were read off them: a wrong argument fails.

They compute on any device what the real ones compute on a GPU: from tensors (B, N, H, D), in float16 or bfloat16 where
the library takes no other.
"""

import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)

# flash-attention/hopper/flash_attn_interface.py of 2026
FLASH3 = {
    "flash_attn_func": "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0, return_attn_probs=False",
}
# flash-attn-4 4.0.0b36, flash_attn/cute/interface.py
_FUNC4 = (
    "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), "
    "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
)
FLASH4 = {
    "flash_attn_func": _FUNC4,
}
# xformers 0.0.35, xformers/ops/fmha/__init__.py
XFORMERS = "query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None"
_OFF = {
    **{name: None for name in ("attn_bias", "qv", "op")},
    **{f"{each}_descale": None for each in "qkv"},
    **{"p": 0.0, "causal": False, "softcap": 0.0, "attention_chunk": 0},
    **{name: None for name in ("learnable_sink", "score_mod", "mask_mod", "block_sparse_tensors")},
}
"""Arguments of what this model has no use for: dropout, masks, sequences of several lengths."""
_NO_WINDOW = (None, (-1, -1), (None, None))


class Library:
    """Functions that bind their arguments to recorded signatures, check them, and note every call."""

    def __init__(self, signatures: dict[str, str], dtypes: tuple[torch.dtype, ...] = HALF, *, scaled: float = 1.0):
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._signatures = signatures
        self._dtypes = dtypes
        self._scaled = scaled
        """What scores are multiplied with besides: 1 is right."""

    def function(self, name: str, compute: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
        signature = inspect.signature(eval(f"lambda {self._signatures[name]}: None"))

        def call(*args: Any, **named: Any) -> Any:
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            given = dict(bound.arguments)
            self.calls.append((name, given))
            used = {key: given[key] for key in given.keys() & _OFF}
            assert used == {key: _OFF[key] for key in used}
            assert given.get("window_size") in _NO_WINDOW
            for key in ("q", "k", "v", "query", "key", "value"):
                if key in given:
                    assert given[key].dtype in self._dtypes
                    assert given[key].ndim == 4
                    assert given[key].stride(-1) == 1
            return compute(given)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Return out_BNHD and lse_BHN."""
        scores = self._scores(q, k, scale)
        out = scores.softmax(-1) @ v.transpose(1, 2).float()
        return out.transpose(1, 2).to(q.dtype), scores.logsumexp(-1)

    def _scores(self, q: Tensor, k: Tensor, scale: float | None) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return q.transpose(1, 2).float() @ k.transpose(1, 2).float().mT * (scale * self._scaled)


def fake_flash3(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Library:
    library = Library(FLASH3, **options)

    def attend(given: dict[str, Any]) -> Any:
        return library.forward(given["q"], given["k"], given["v"], given["softmax_scale"])[0]

    (interface,) = _modules(monkeypatch, "flash_attn_interface")
    interface.flash_attn_func = library.function("flash_attn_func", attend)  # type: ignore[attr-defined]
    return library


def fake_flash4(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Library:
    """Likewise FlashAttention 4, which always returns a pair."""
    library = Library(FLASH4, **options)

    def attend(given: dict[str, Any]) -> Any:
        return library.forward(given["q"], given["k"], given["v"], given["softmax_scale"])

    _, cute = _modules(monkeypatch, "flash_attn", "flash_attn.cute")
    cute.flash_attn_func = library.function("flash_attn_func", attend)  # type: ignore[attr-defined]
    return library


def fake_xformers(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Library:
    name = "memory_efficient_attention"
    library = Library({name: XFORMERS}, (*HALF, torch.float32), **options)

    def attend(given: dict[str, Any]) -> Tensor:
        return library.forward(given["query"], given["key"], given["value"], given["scale"])[0]

    _, ops = _modules(monkeypatch, "xformers", "xformers.ops")
    setattr(ops, name, library.function(name, attend))
    return library


def _modules(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[ModuleType]:
    made = []
    for name in names:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        made.append(module)
    for parent, child in pairwise(made):
        setattr(parent, child.__name__.rpartition(".")[2], child)
    return made
