"""Compile the blocks of a transformer with torch.compile: one graph for each kind of block, shared by all its blocks.

The attention of a block may exchange with other ranks, or call a library that the compiler cannot trace. Without
gradients such attention is one operator of the graph, so that it does not break the graph in two.
"""

import atexit
import os
import stat
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.core.attention import ATTENTION_KINDS, AttentionBackend, AttentionFn
from opensora_cli.core.files import temporary_folder, user_cache
from opensora_cli.core.python_processes import safe_environment
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.model import MMDiT

Backend = str | Callable[..., Any]
"""Backend of torch.compile."""

_called: list[AttentionFn] = []
"""Attention of the running block, at the end."""


def compile_blocks(transformer: MMDiT, *, warn: Callable[[str], None], backend: Backend = "inductor") -> None:
    """Make the blocks of a transformer run compiled; names and weights stay.

    Each block gets a class whose `forward` is compiled; checkpointing and the hooks of FSDP2 and of `stream_blocks`
    are added later. Add adapters and layers in 8 bits before, or everything is compiled twice. Blocks must share no
    weights, and their layers must exchange nothing with other ranks; the attention may, without gradients.

    A kind of block that cannot be compiled as a whole runs uncompiled, and so do chunks of tokens
    (`set_sequence_chunk`); `warn` is called once for each cause.
    """
    _keep_private(backend)
    for stack in repeated_blocks(transformer.config):
        blocks = list(transformer.get_submodule(stack.module_path).children())
        for plain in {type(block) for block in blocks}:
            compiled = _compiled_class(plain, backend)  # type: ignore[arg-type]  # classes have hashes
            compiled.warn = staticmethod(warn)  # type: ignore[attr-defined]  # the class is made here
            for block in blocks:
                if type(block) is plain:
                    block.__class__ = compiled


def _keep_private(backend: Backend) -> None:
    """Keep the compiler from code that other accounts can write, and its processes from code in the working folder."""
    os.environ.update(safe_environment({}))
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ[variable] = os.environ.get(variable) or str(_private_folder() / name)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    if backend == "inductor":
        # This import takes seconds, and few runs need it.
        from torch._inductor import codecache

        # Torch keeps these in its own folder whatever the variable says. Without them each kernel takes seconds more.
        codecache._HEADER_DIR = str(folder / "precompiled_headers")
        codecache._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")


@cache
def _private_folder() -> Path:
    """Return a folder for compiled code, which later runs execute: in the user's cache, or else temporary.

    Torch's own default is a predictable name among the temporary files, which another account can create first.
    """
    folder = user_cache("compiled")
    with suppress(OSError):
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
            is_ours = sys.platform == "win32" or state.st_uid == os.geteuid()
            if is_ours and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK):
                return folder
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(temporary_folder())


@cache
def _compiled_class(plain: type[nn.Module], backend: Backend) -> type[nn.Module]:
    # This import takes a second, and few runs need it.
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    fast = torch.compile(plain.forward, backend=backend, fullgraph=True)
    operator = _attention_operator()
    can_compile = True
    problems = set[str]()

    def report(self: nn.Module, problem: str) -> None:
        if problem not in problems:
            problems.add(problem)
            self.warn(f"{plain.__name__} {problem}")  # type: ignore[operator]  # of the class below

    def forward(self: nn.Module, *args: Any) -> Any:
        nonlocal can_compile
        if can_compile and _in_chunks(self, args[0]):
            report(self, f"runs uncompiled, {self.chunk_tokens} tokens at a time: compiled it would need more memory")
        elif can_compile:
            _called.append(vars(self)["attention"])
            try:
                return fast(self, *args)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                can_compile = False
                # The first line names the backend, the second the code that it cannot compile.
                reason = " ".join(str(error).strip().splitlines()[:2])
                report(self, f"cannot be compiled and runs uncompiled: {reason}")
            finally:
                _called.pop()
        return plain.forward(self, *args)

    def attention(self: nn.Module) -> AttentionFn:
        own: AttentionFn = vars(self)["attention"]
        # The compiler can trace only torch's own backends.
        kind = ATTENTION_KINDS.get(own.name) if isinstance(own, AttentionBackend) else None
        is_traceable = kind is not None and kind.library is None
        if not torch.compiler.is_compiling() or torch.is_grad_enabled() or is_traceable:
            return own
        return operator

    def set_attention(self: nn.Module, attention: AttentionFn) -> None:
        vars(self)["attention"] = attention

    members = {"forward": forward, "attention": property(attention, set_attention)}
    return type(f"Compiled{plain.__name__}", (plain,), members)


def _in_chunks(block: nn.Module, tokens_BND: Tensor) -> bool:
    size = block.chunk_tokens
    return isinstance(size, int) and size < tokens_BND.shape[1] and not torch.is_grad_enabled()


@cache
def _attention_operator() -> AttentionFn:
    """Return an operator that computes the attention of the running block."""

    @torch.library.custom_op("osora::attention", mutates_args=())
    def attention(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        return _called[-1](q_BHND, k_BHND, v_BHND).transpose(1, 2).contiguous()

    @attention.register_fake
    def _(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        return v_BHND.new_empty(q_BHND.shape[0], q_BHND.shape[2], q_BHND.shape[1], v_BHND.shape[3])

    def transposed(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, /) -> Tensor:
        # Tokens before heads in memory, the layout of most kernels.
        out_BNHD: Tensor = attention(q_BHND, k_BHND, v_BHND)
        return out_BNHD.transpose(1, 2)

    return transposed
