"""A compiled function: once for any number of tokens and any owner, whatever thread and mode calls it, or refused."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F  # noqa: N812

from raypp.errors import ConfigError
from raypp.graphs.compiled import CompiledFunction

MOST_TOKENS = 300


class Scale:
    """An owner: its weight is an input."""

    def __init__(self, size: int, seed: int) -> None:
        self.weight = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        self.nested = [self.weight.exp()]


def gate(scale: Scale, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x * scale.weight) + y * scale.nested[0]


def asks_the_device(scale: Scale, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > 0 else x


def _compiled(function, size=8, *, backend="aot_eager", fewest_tokens=1, most_tokens=MOST_TOKENS, num_tensors=2):
    like = [torch.zeros(1, size)] * num_tensors
    options = {"fewest_tokens": fewest_tokens, "most_tokens": most_tokens, "backend": backend}
    with torch.inference_mode():
        return CompiledFunction(function, Scale(size, 0), like, **options)


def _check(compiled: CompiledFunction, size: int = 8, counts=(1, 2, 3, 64, MOST_TOKENS)) -> None:
    with torch.inference_mode():
        for owner in (Scale(size, seed) for seed in range(3)):
            for count in counts:
                x, y = torch.randn(2, count, size).unbind()
                torch.testing.assert_close(compiled(owner, x, y), gate(owner, x, y))


def test_any_number_of_tokens_and_any_owner():
    compiled = _compiled(gate)
    assert compiled.num_compiled == 2  # one token, any other number
    _check(compiled)
    assert compiled.num_compiled == 2


def test_other_threads_and_memory_that_was_made_elsewhere():
    """What torch's guards would compile anew for: nothing is."""
    compiled, buffer = _compiled(gate), torch.randn(2, MOST_TOKENS, 8)  # not made in inference mode
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _check(compiled)
            with torch.inference_mode():
                x, y = buffer[:, 20:50].unbind()
                torch.testing.assert_close(compiled(Scale(8, 1), x, y), gate(Scale(8, 1), x, y))
        except BaseException as error:
            errors.append(error)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.set_num_threads(num_threads)
    assert not errors
    assert compiled.num_compiled == 2


def test_each_has_its_own():
    """More of them in a process than torch keeps versions of a function; sizes do not mix."""
    every = [(size, _compiled(gate, size, fewest_tokens=2)) for size in range(4, 13)]
    assert all(compiled.num_compiled == 1 for _, compiled in every)
    for size, compiled in every:
        _check(compiled, size, counts=(2, 5))


@pytest.mark.parametrize("most_tokens", [1, 2])
def test_few_tokens(most_tokens):
    compiled = _compiled(gate, most_tokens=most_tokens)
    assert compiled.num_compiled == most_tokens
    _check(compiled, counts=range(1, most_tokens + 1))


def test_the_default_compiler():
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with inductor_config.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):  # seconds less
        compiled = _compiled(gate, backend="inductor", fewest_tokens=2)
    _check(compiled, counts=(2, 3, 64, MOST_TOKENS))
    assert compiled.num_compiled == 1


@pytest.mark.parametrize(
    ("function", "backend", "got"),
    [(asks_the_device, "aot_eager", "data-dependent"), (gate, "no_such_compiler", "no_such_compiler")],
    ids=["asks", "backend"],
)
def test_what_cannot_be_compiled_is_refused(function, backend, got):
    with pytest.raises(ConfigError, match=r"torch\.compile cannot compile") as caught:
        _compiled(function, backend=backend, num_tensors=1 if function is asks_the_device else 2)
    assert got in caught.value.got
    assert "graphs.compile" in caught.value.hint


def test_without_a_cpp_compiler():
    with (
        inductor_config.patch({"cpp.cxx": ("/no/such/compiler",), "force_disable_caches": True}),
        pytest.raises(ConfigError, match=r"torch\.compile cannot compile") as caught,
    ):
        _compiled(gate, size=11, backend="inductor", fewest_tokens=2)
    assert "C++ compiler" in caught.value.expected
