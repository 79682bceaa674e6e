"""Members choose from their parts of the logits what one would choose from all: in torch, and by kernels."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import kernel_checks as checks
import torch
from sizes import IS_FULL

from raypp.ops.cuda.kernel_launch import Workspace
from raypp.ops.cuda.kernel_token_choice import KernelTokenChoice
from raypp.ops.row_tokens import RowTokens, StepTokens
from raypp.ops.sample.adjust import BANNED
from raypp.ops.sample.draw_sizes import exchanged_bytes
from raypp.ops.sample.tables import AdjustedLogits, Adjustments, PositionMasks, RowTables, Widths
from raypp.ops.sample.token_choice import TokenChoice, TorchTokenChoice
from raypp.ops.sample.token_history import TokenHistory
from raypp.ops.sample.truncation import may_draw
from raypp.ops.sample.vocabulary_part import VocabularyPart, hide_padding
from raypp.row_params import Needs
from raypp.specdec.table_bytes import row_tokens_width
from raypp.transport.host.host_members import ThreadMembers, thread_members

NUM_ROWS = 9
DEADLINE_S = 60.0
FULL = pytest.mark.full
PARTS = ((2, 200), (3, 1000), (4, 399))
"""Members, and sizes of vocabularies that they divide or not."""


class InTurns:
    """A member in a thread of its own, which computes only while no other does: Triton's interpreter is not shared."""

    memory, is_alone = None, False

    def __init__(self, member: ThreadMembers, turn: threading.Lock) -> None:
        self.rank, self.count = member.rank, member.count
        self.num_bytes: list[int] = []  # that others got from it
        self._member, self._turn = member, turn

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        self._turn.release()
        try:
            self.num_bytes.append(x.nbytes * (self.count - 1))
            return self._member.gathered(x)
        finally:
            self._turn.acquire()


def _tables(vocab_size: int, seed: int) -> RowTables:
    kernels = checks.Kernels(torch.float32, seed=seed)
    tables = checks._some_tables(kernels, NUM_ROWS, vocab_size, Widths(16, 4, 32), 8)
    rng, device = random.Random(seed), checks.DEVICE

    def some(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([rng.choice(values) for _ in range(NUM_ROWS)], dtype=dtype, device=device)

    tables.temperature = some(0.0, 0.2, 0.8, 1.5)
    tables.top_k, tables.top_p = some(0, 1, 20, vocab_size // 2, dtype=torch.int32), some(1.0, 0.7, 0.999)
    tables.min_p, tables.seed = some(0.0, 0.05), torch.arange(NUM_ROWS, device=device) * 7919 - 3
    return tables


def _run(
    choice: TokenChoice, logits: torch.Tensor, unequal: torch.Tensor, chosen: torch.Tensor, asked: Adjustments
) -> list[torch.Tensor]:
    """Return what is chosen: greedily, by draws without truncation and with, of own and of changed logits; reports."""
    rows, positions, tables = asked.rows, asked.positions, asked.tables
    plain, found = AdjustedLogits(logits), []
    untruncated = RowTables(**vars(tables))
    untruncated.top_k, untruncated.top_p = torch.zeros_like(tables.top_k), torch.ones_like(tables.top_p)
    untruncated.min_p = torch.zeros_like(tables.min_p)
    for of in (plain, choice.adjust(logits, asked)):
        found.append(choice.greedy(of))
        found.append(choice.draw(of, rows, positions, untruncated, truncates=False))
        found.append(choice.draw(of, rows, positions, tables))
    top = choice.report(unequal, rows, chosen, tables.num_reported)
    for at, row in enumerate(rows.tolist()):
        columns = slice(0, int(tables.num_reported[row]))
        found += [top.token_ids[at, columns], top.logprobs[at, columns]]
        found += [top.ranks[at : at + 1]] if tables.num_reported[row] else []
    return [each.clone() for each in found]


def _asked(vocab_size: int, seed: int) -> Adjustments:
    device = checks.DEVICE
    history = TokenHistory(RowTokens(NUM_ROWS, row_tokens_width(0, 0), device), vocab_size, 0, device)
    generator, lengths = np.random.default_rng(seed), [3 + row for row in range(NUM_ROWS)]
    for row, length in enumerate(lengths):
        known = generator.integers(0, vocab_size, length).astype(np.int32)
        history.tokens.write(
            StepTokens(*(torch.tensor(each, device=device) for each in ([row], [0], [known.tolist()])))
        )
        history.start(row, known, length // 2, counts=True)
    tables = _tables(vocab_size, seed)
    bits = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32)), dtype=torch.int32, device=device)
    masks = PositionMasks(torch.tensor([-1, 0, 1] * 3, dtype=torch.int32, device=device), bits)
    rows = torch.randperm(NUM_ROWS).to(device)
    positions = torch.tensor(lengths, device=device)[rows]
    return Adjustments(rows, positions, tables, history, Needs.ALL, Widths(16, 4, 32), masks)


def _choices(kind: str, num_rows: int = NUM_ROWS) -> Callable[[VocabularyPart | None], TokenChoice]:
    if kind == "torch":
        return TorchTokenChoice
    device = checks.Kernels(torch.float32).device
    return lambda part: KernelTokenChoice(num_rows, device, Workspace(checks.DEVICE), part)


@pytest.mark.in_ci("torch-2-200", "torch-3-1000", "torch-4-399", "kernels-2-200")
@pytest.mark.parametrize(
    ("kind", "count", "vocab_size"),
    [
        *(("torch", *each) for each in PARTS),
        *(("kernels", *each) for each in PARTS[:2]),
        pytest.param("kernels", *PARTS[2], marks=FULL),
    ],
)
def test_members_choose_what_one_would(kind, count, vocab_size):
    torch.manual_seed(count)
    make, asked = _choices(kind), _asked(vocab_size, count)
    logits, unequal = torch.randn(2, NUM_ROWS, vocab_size, device=checks.DEVICE) * 3
    chosen = torch.randint(vocab_size, (NUM_ROWS,), device=checks.DEVICE)
    logits[1] = logits[1].round()  # many are equal
    logits[2] = 0.5
    logits[3, -1] = torch.nan
    logits[4, : vocab_size // 2] = -torch.inf
    expected = _run(make(None), logits, unequal, chosen, asked)
    turn = threading.Lock()
    members: list[Any] = [InTurns(each, turn) for each in thread_members(count, DEADLINE_S)]

    def choose(member: Any) -> list[torch.Tensor]:
        part = VocabularyPart(member, vocab_size)
        own = torch.zeros(2, NUM_ROWS, part.size, device=checks.DEVICE)
        for to, whole in zip(own, (logits, unequal), strict=True):
            to[:, : part.num_tokens] = whole[:, part.first : part.first + part.num_tokens]
            hide_padding(to, part)
        with turn:
            return _run(make(part), *own, chosen, asked)

    with ThreadPoolExecutor(count) as pool:
        for found in pool.map(choose, members):
            for got, wanted in zip(found, expected, strict=True):
                if got.dtype == torch.float32:
                    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-5, equal_nan=True)
                else:
                    assert torch.equal(got, wanted)


def test_scores_of_no_allowed_token_yield_the_first():
    def best(member: Any) -> int:
        part = VocabularyPart(member, 10)
        return part.best(torch.full((1, part.size), torch.nan))[1].item()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(best, thread_members(2, DEADLINE_S))) == [0, 0]


def test_a_greedy_row_brings_eight_bytes_to_each_other_member():
    turn = threading.Lock()
    members: list[Any] = [InTurns(each, turn) for each in thread_members(2, DEADLINE_S)]

    def choose(member: Any) -> int:
        with turn:
            logits = AdjustedLogits(torch.zeros(NUM_ROWS, 500))
            return TorchTokenChoice(VocabularyPart(member, 1000)).greedy(logits).sum().item()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(choose, members)) == [0, 0]
    assert [each.num_bytes for each in members] == [[8 * NUM_ROWS]] * 2


SETTINGS = [  # top_k, top_p, min_p, temperature; a row each
    (1, 1.0, 0.0, 0.7),
    (20, 0.95, 0.0, 0.6),
    (0, 0.9, 0.0, 1.0),
    (0, 1e-6, 0.0, 1.0),
    (0, 1.0, 0.1, 1.0),
    (150, 0.6, 0.01, 1.7),
    (300, 0.5, 0.0, 1.0),
    (100_000, 1.0, 0.2, 1.0),
    (0, 0.01, 0.0, 30.0),
    (3, 0.7, 0.0, 2.0),
    (0, 1.0, 0.5, 1e-37),
    (2, 0.99, 0.0, 1e-4),
    (5, 0.5, 0.0, 0.0),
    (0, 1.0, 0.0, 1.0),
]


def _tables_of(settings: list[tuple[int, float, float, float]]) -> RowTables:
    top_k, *others = zip(*settings, strict=True)
    top_p, min_p, temperature = (torch.tensor(each, device=checks.DEVICE) for each in others)
    return RowTables(
        top_k=torch.tensor(top_k, dtype=torch.int32, device=checks.DEVICE),
        top_p=top_p,
        min_p=min_p,
        temperature=temperature,
        seed=torch.arange(len(settings), device=checks.DEVICE) * 7919 - 3,
    )


def _logits(vocab_size: int, count: int) -> dict[str, torch.Tensor]:
    """Return logits whose cuts are hard to find, [rows, V] each."""
    generator, shape = torch.Generator().manual_seed(count), (len(SETTINGS), vocab_size)
    normal = torch.randn(shape, generator=generator)
    few = torch.full(shape, -torch.inf)
    few[:, vocab_size - 3 :] = normal[:, :3]  # all of the last member
    banned = normal.clone()
    banned[:, ::2] = BANNED
    found = {
        "peaked": normal * 5,
        "flat": normal * 0.01,
        "ties": (normal * 2).round(),
        "all alike": torch.full(shape, 0.5),
        "of one member": few,
        "banned": banned,
        "neighbours": 20.0 + torch.randint(0, 40, shape, generator=generator) * 2.0**-19,
        "not finite": normal.index_fill(1, torch.tensor([vocab_size - 2]), torch.nan),
    }
    return {name: logits.to(checks.DEVICE) for name, logits in found.items()}


def _by_members(count: int, vocab_size: int, choose: Callable[[VocabularyPart], Any]) -> tuple[list[Any], list[Any]]:
    """Return what each member makes of its part, and the members."""
    turn = threading.Lock()
    members: list[Any] = [InTurns(each, turn) for each in thread_members(count, DEADLINE_S)]

    def run(member: Any) -> Any:
        with turn:
            return choose(VocabularyPart(member, vocab_size))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, members)), members


def _own(logits: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    own = torch.full((len(logits), part.size), -torch.inf, device=logits.device)
    own[:, : part.num_tokens] = logits[:, part.first : part.first + part.num_tokens]
    return own


KINDS = [("torch", 2, 307), ("torch", 4, 9001), ("kernels", 2, 307), ("kernels", 2, 9001)]


@pytest.mark.in_ci("torch-4-9001", "kernels-2-307", "kernels-2-9001")
@pytest.mark.parametrize(("kind", "count", "vocab_size"), [*KINDS, pytest.param("kernels", 4, 307, marks=FULL)])
def test_truncated_draws_are_those_of_one_member(kind, count, vocab_size):
    """And the kernels draw as torch does. What is exchanged depends on the number of rows alone."""
    rows, tables = torch.arange(len(SETTINGS), device=checks.DEVICE), _tables_of(SETTINGS)
    make, exchanged = _choices(kind, len(SETTINGS)), set()
    is_slow = kind == "kernels" and checks.DEVICE.type == "cpu" and not IS_FULL
    for index, (name, logits) in enumerate(_logits(vocab_size, count).items()):
        if is_slow and vocab_size > 5000 and name != "flat":
            continue
        for first in (index,) if is_slow else range(8):
            positions = rows * 31 + first
            asked = rows, positions, tables
            expected = make(None).draw(AdjustedLogits(logits), *asked)
            drawn, members = _by_members(
                count,
                vocab_size,
                lambda part, logits=logits, asked=asked: make(part).draw(AdjustedLogits(_own(logits, part)), *asked),
            )
            assert all(torch.equal(each, expected) for each in drawn), name
            exchanged.update(tuple(member.num_bytes) for member in members)
            twins = TorchTokenChoice().draw(AdjustedLogits(logits), *asked)
            assert (twins != expected).sum() <= (0 if kind == "torch" else 1), "at a near-tie of noise"
    [num_bytes] = exchanged
    assert len(num_bytes) == {"torch": 8, "kernels": 7}[kind]
    if kind == "kernels":
        small = 2 * 8 * (-(-len(rows) // 8) * 8) * (count - 1)  # values and pivots, then scores and tokens
        assert sum(num_bytes) == exchanged_bytes(count) * len(rows) + small


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_same_tokens_stay_of_parts(count):
    vocab_size, tables = 307, _tables_of(SETTINGS)
    for name, logits in _logits(vocab_size, count).items():
        highest, temperature = logits.amax(-1), tables.temperature.clamp(min=1e-5)
        asked = highest, temperature, (tables.top_k, tables.top_p, tables.min_p)

        def stay(part: VocabularyPart, logits: torch.Tensor = logits, asked: Any = asked) -> torch.Tensor:
            return may_draw(_own(logits, part), *asked, part.total)[:, : part.num_tokens]

        if name != "not finite":
            found, _ = _by_members(count, vocab_size, stay)
            assert torch.equal(torch.cat(found, 1), may_draw(logits, *asked)), name
