"""Page-locked memory: who owns it, who has it next, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from raypp.errors import ResourceError
from raypp.ops.cuda import pinned_blocks as module
from raypp.ops.cuda.pinned_blocks import locked_memory, spare_bytes


class Owner:
    """Of memory."""


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Addresses and bytes that are locked."""
    locked: dict[int, int] = {}

    def lock(address: int, num_bytes: int, flags: int) -> int:
        if num_bytes > 1 << 20:
            return 2
        locked[address] = num_bytes
        return 0

    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=locked.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module, "_left_behind", [])
    return locked


def test_the_next_owner_of_as_much_gets_what_the_last_one_left(locked):
    first, beside = Owner(), Owner()
    address = locked_memory(1000, first).data_ptr()
    other = locked_memory(1000, beside).data_ptr()
    assert locked == {address: 1000, other: 1000}
    del first
    second = Owner()
    assert locked_memory(1000, second).data_ptr() == address
    assert locked == {address: 1000, other: 1000}


def test_what_nobody_wants_again_is_unlocked(locked):
    first = Owner()
    locked_memory(1000, first)
    del first
    second = Owner()
    memory = locked_memory(2000, second)
    assert (memory.dtype, memory.shape) == (torch.uint8, (2000,))
    assert locked == {memory.data_ptr(): 2000}


def test_too_much_is_refused_with_the_numbers(locked, monkeypatch):
    with pytest.raises(ResourceError, match="cannot be page-locked") as caught:
        locked_memory(1 << 21, Owner())
    assert "error 2" in str(caught.value.got)
    monkeypatch.setattr(module, "spare_bytes", lambda: 1 << 30)
    with pytest.raises(ResourceError, match="too little main memory") as caught:
        locked_memory(3 << 30, Owner())
    assert (caught.value.got, "3.00 GiB" in str(caught.value.expected)) == ("1.00 GiB to spare", True)


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    of_machine = spare_bytes()
    assert of_machine is None or of_machine > 1 << 20
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 200\ninactive_file 50\n")
    assert spare_bytes() == 2250, "what was read of files can go"
    (tmp_path / "memory.max").write_text("max\n")
    assert spare_bytes() == pytest.approx(of_machine, rel=0.2)
