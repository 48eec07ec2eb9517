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

# flash-attn 2.8.3.post2, flash_attn/flash_attn_interface.py
FLASH2 = {
    "flash_attn_func": "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False",
}
# flash-attention/hopper/flash_attn_interface.py of 2026
FLASH3 = {
    "flash_attn_func": "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0, return_attn_probs=False",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, "
    "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, "
    "is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
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
    **{name: None for name in ("attn_bias", "alibi_slopes", "qv", "op")},
    **{f"{each}_descale": None for each in "qkv"},
    **{name: None for name in ("cu_seqlens_q", "cu_seqlens_k", "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k")},
    **{"dropout_p": 0.0, "p": 0.0, "causal": False, "is_causal": False, "softcap": 0.0, "attention_chunk": 0},
    **{name: None for name in ("learnable_sink", "score_mod", "mask_mod", "block_sparse_tensors", "dlse")},
}
"""Arguments of what this model has no use for: dropout, masks, sequences of several lengths."""
_WINDOWS = {"window_size", "window_size_left", "window_size_right"}
_NO_WINDOW = (-1, None, (-1, -1), (None, None))


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
            assert all(given[key] in _NO_WINDOW for key in given.keys() & _WINDOWS)
            for key in ("q", "k", "v", "query", "key", "value", "dout", "grad"):
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

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert lse.dtype is torch.float32
        assert lse.is_contiguous()
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        weights = (self._scores(q, k, scale) - lse[..., None]).exp()
        heads_first = (tensor.transpose(1, 2).float() for tensor in (gradient, q, k, v, out))
        gradient, q_, k_, v_, out = heads_first
        of_scores = weights * (gradient @ v_.mT - (gradient * out).sum(-1, keepdim=True)) * scale
        grads = of_scores @ k_, of_scores.mT @ q_, weights.mT @ gradient
        of_q, of_k, of_v = (grad.transpose(1, 2).to(q.dtype) for grad in grads)
        return of_q, of_k, of_v

    def _scores(self, q: Tensor, k: Tensor, scale: float | None) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return q.transpose(1, 2).float() @ k.transpose(1, 2).float().mT * (scale * self._scaled)


def fake_flash2(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Library:
    """Put flash-attn in the place of whatever there is."""
    library = Library(FLASH2, **options)

    def attend(given: dict[str, Any]) -> Any:
        return library.forward(given["q"], given["k"], given["v"], given["softmax_scale"])[0]

    (package,) = _modules(monkeypatch, "flash_attn")
    package.flash_attn_func = library.function("flash_attn_func", attend)  # type: ignore[attr-defined]
    return library


def fake_flash3(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Library:
    """Put FlashAttention 3 in the place of whatever there is."""
    library = Library(FLASH3, **options)

    def attend(given: dict[str, Any]) -> Any:
        out, lse = library.forward(given["q"], given["k"], given["v"], given["softmax_scale"])
        return (out, lse) if given.get("return_attn_probs") else out

    (interface,) = _modules(monkeypatch, "flash_attn_interface")
    interface.flash_attn_func = library.function("flash_attn_func", attend)  # type: ignore[attr-defined]
    backward = library.function("_flash_attn_backward", lambda given: _into(library, given))
    interface._flash_attn_backward = backward  # type: ignore[attr-defined]
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
    """Likewise xformers."""
    name = "memory_efficient_attention"
    library = Library({name: XFORMERS}, (*HALF, torch.float32), **options)

    def attend(given: dict[str, Any]) -> Tensor:
        return library.forward(given["query"], given["key"], given["value"], given["scale"])[0]

    _, ops = _modules(monkeypatch, "xformers", "xformers.ops")
    setattr(ops, name, library.function(name, attend))
    return library


def _into(library: Library, given: dict[str, Any]) -> None:
    kept = (given[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse", "softmax_scale"))
    for place, grad in zip((given["dq"], given["dk"], given["dv"]), library.backward(*kept), strict=True):
        place.copy_(grad)


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
