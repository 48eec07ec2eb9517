"""A transformer's blocks, compiled by torch.compile: one graph for each kind of block, which all blocks of it share.

The attention of a block may be that of several ranks, or of a library that the compiler cannot look into. Where no
gradient is recorded, such attention is one operator of the graph, so that it does not break it in two.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.core.attention import AttentionBackend, AttentionFn
from opensora_cli.core.attention_kinds import ATTENTION_KINDS
from opensora_cli.core.compiled_code import use_private_caches
from opensora_cli.core.python_processes import safe_environment
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.mmdit.blocks import repeated_blocks

Backend = str | Callable[..., Any]
"""Of torch.compile."""

_called: list[AttentionFn] = []
"""The attention of the block that is being called, last."""


def compile_blocks(transformer: MMDiT, *, warn: Callable[[str], None], backend: Backend = "inductor") -> None:
    """Let a transformer's blocks run compiled from now on; names and weights stay as they are.

    Blocks get a class whose `forward` is compiled. So checkpoints lie around the compiled code, and so do the hooks of
    FSDP2 and of `stream_blocks`, which are put on later. Adapters and layers in 8 bits are put in before, or everything
    is compiled twice. What has been compiled serves all transformers of this process. Blocks must share no weights, and
    their layers exchange nothing with other ranks; the attention may, where no gradient is recorded. A kind of block
    that cannot be compiled as a whole runs as before, and so do calls in which blocks compute fewer tokens at a time
    than there are (`set_sequence_chunk`): compiled, that would take the memory of all. `warn` is called once for each.

    What the compiler keeps for the next run lies in `private_folder`s. Raises OutputError if others may write to them.
    """
    _keep_private(backend)
    for stack in repeated_blocks(transformer.config):
        blocks = list(transformer.get_submodule(stack.module_path).children())
        for plain in {type(block) for block in blocks}:
            compiled = _compiled_class(plain, backend)  # type: ignore[arg-type]  # classes have hashes
            compiled.warn = staticmethod(warn)  # type: ignore[attr-defined]  # of a class that is made here
            for block in blocks:
                if type(block) is plain:
                    block.__class__ = compiled


def _keep_private(backend: Backend) -> None:
    """Have the compiler load no code that another account may have written, and its processes none from the working
    folder.
    """
    os.environ.update(safe_environment({}))
    folder = use_private_caches(os.environ)
    if backend == "inductor":
        # Not at the top: it takes seconds, and few runs need it.
        from torch._inductor import codecache

        # Torch keeps these in its own folder whatever the variable says. Without them, each kernel takes seconds more.
        codecache._HEADER_DIR = str(folder / "precompiled_headers")
        codecache._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")


@cache
def _compiled_class(plain: type[nn.Module], backend: Backend) -> type[nn.Module]:
    # Not at the top: it takes a second, and few runs need it.
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
            report(self, f"runs as it is, {self.chunk_tokens} tokens at a time: compiled it would need more memory")
        elif can_compile:
            try:
                with _calling(vars(self)["attention"]):
                    return fast(self, *args)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                can_compile = False
                # The first line names the backend, the second what it stumbled over.
                reason = " ".join(str(error).strip().splitlines()[:2])
                report(self, f"cannot be compiled and runs as it is: {reason}")
        return plain.forward(self, *args)

    def attention(self: nn.Module) -> AttentionFn:
        own: AttentionFn = vars(self)["attention"]
        if not torch.compiler.is_compiling() or torch.is_grad_enabled() or _is_traced(own):
            return own
        return operator

    def set_attention(self: nn.Module, attention: AttentionFn) -> None:
        vars(self)["attention"] = attention

    members = {"forward": forward, "attention": property(attention, set_attention)}
    return type(f"Compiled{plain.__name__}", (plain,), members)


def _in_chunks(block: nn.Module, tokens_BND: Tensor) -> bool:
    size = block.chunk_tokens
    return isinstance(size, int) and size < tokens_BND.shape[1] and not torch.is_grad_enabled()


def _is_traced(attention: AttentionFn) -> bool:
    """Whether the compiler looks into an attention: into those of torch alone."""
    kind = ATTENTION_KINDS.get(attention.name) if isinstance(attention, AttentionBackend) else None
    return kind is not None and kind.library is None


@contextmanager
def _calling(attention: AttentionFn) -> Iterator[None]:
    _called.append(attention)
    try:
        yield
    finally:
        _called.pop()


@cache
def _attention_operator() -> AttentionFn:
    """Return an operator that computes what the block that is being called has as its attention."""

    @torch.library.custom_op("osora::attention", mutates_args=())
    def attention(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        return _called[-1](q_BHND, k_BHND, v_BHND).transpose(1, 2).contiguous()

    @attention.register_fake
    def _(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        return v_BHND.new_empty(q_BHND.shape[0], q_BHND.shape[2], q_BHND.shape[1], v_BHND.shape[3])

    def transposed(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, /) -> Tensor:
        # Tokens lie before heads, as most kernels have them.
        out_BNHD: Tensor = attention(q_BHND, k_BHND, v_BHND)
        return out_BNHD.transpose(1, 2)

    return transposed
