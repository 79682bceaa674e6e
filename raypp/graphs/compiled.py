"""Functions of a step's tokens through torch.compile: compiled when they are made, and never after that.

A function takes an object and tensors [T, ...]. The object's own tensors, its weights, are inputs of what is compiled,
so that one serves all objects that are built alike: the layers of a model. T is an input too. One token is compiled
apart, for torch takes a size of one for a constant.

torch asks before every call whether what it compiled still fits ("guards"), and compiles anew when it does not. Here
the caller answers for that, nobody asks, and no step ever waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import lookup_backend

from raypp.errors import ConfigError

_EXAMPLE_TOKENS = 64
_ONE_THREAD = {"compile_threads": 1}
"""torch's compiler would start a process per core, and leave them waiting, for the handful of kernels of a layer."""


TokenFunction = Callable[..., torch.Tensor]
"""Takes an object and tensors [T, ...], which it may overwrite; returns a tensor [T, ...]. Pure besides."""


class CompiledFunction:
    """A `TokenFunction` by a compiler. To be made, and called, in inference mode.

    Args:
        function: What to compile; a function without a closure.
        owner: One of those that it will be called with. The others must have the same types, and tensors of the same
            shapes, types and device, in the same places.
        like: A tensor [*, ...] for each that it will be called with.
        fewest_tokens: T at least.
        most_tokens: T at most.
        backend: torch's name of the compiler.

    Raises:
        ConfigError: the compiler cannot; says why.
    """

    def __init__(
        self,
        function: TokenFunction,
        owner: object,
        like: Sequence[torch.Tensor],
        *,
        fewest_tokens: int,
        most_tokens: int,
        backend: str,
    ) -> None:
        self.num_compiled = 0
        self._backend = backend
        self._one = self._several = function
        try:
            if fewest_tokens == 1:
                self._one = self._compiled(function)
                self._one(owner, *(torch.zeros_like(tensor[:1]) for tensor in like))
            if most_tokens > 1:
                self._several = self._compiled(function)
                self._several(owner, *(_any_number(tensor, most_tokens) for tensor in like))
        except Exception as error:  # of the many kinds that torch and the compilers it calls have
            reason = getattr(error, "inner_exception", error)
            raise ConfigError(
                "torch.compile cannot compile the layers",
                got=f"{type(reason).__name__}: {str(reason).strip().split(chr(10), 1)[0]}",
                expected="a compiler that torch can use: Triton for a GPU, a C++ compiler (CXX, g++) for a CPU",
                hint="leave graphs.compile at false; the log of the stage has the whole error",
            ) from error

    def __call__(self, owner: object, *tensors: torch.Tensor) -> torch.Tensor:
        """Return what the function returns. Shapes: tensors [T, ...], contiguous."""
        return (self._one if len(tensors[0]) == 1 else self._several)(owner, *tensors)

    def _compiled(self, function: TokenFunction) -> TokenFunction:
        assert isinstance(function, FunctionType)
        # torch keeps what it compiled at the code, for all its functions together, and only so many; as a copy it is
        # this object's alone, and goes with it.
        own = FunctionType(function.__code__.replace(), function.__globals__)
        compiled: TokenFunction = torch.compile(
            own,
            backend=self._compile,
            fullgraph=True,
            dynamic=False,  # but for what is marked
            options={"guard_filter_fn": lambda guards: [False] * len(guards)},
        )
        return compiled

    def _compile(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Be torch's backend."""
        self.num_compiled += 1
        options = {"config_patches": _ONE_THREAD} if self._backend == "inductor" else {}
        compiled: Callable[..., Any] = lookup_backend(self._backend)(module, inputs, **options)
        return compiled


def _any_number(like: torch.Tensor, most_tokens: int) -> torch.Tensor:
    """Return an example whose number of tokens stands for any of two or more."""
    most_tokens = max(most_tokens, _EXAMPLE_TOKENS)
    example = torch.zeros(_EXAMPLE_TOKENS, *like.shape[1:], dtype=like.dtype, device=like.device)
    torch._dynamo.mark_dynamic(example, 0, min=2, max=most_tokens)
    return example
