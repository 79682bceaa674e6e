"""How long n-gram drafts take on a GPU, inside a CUDA graph: the kernel, its torch twin, and brute force in torch.

    python benchmarks/micro/ngram.py                     about a minute on one GPU

For 64 rows of 4,096 tokens and 256 rows of 32,768, all at full length, n from 2 to 5, 8 drafts. Texts: `none` has no
token twice, so nothing matches and everything must be looked at; `some` is random with matches of all lengths; `text`
repeats its common tokens as language does. Before every call the second-level cache is overwritten; what that takes is
measured without the call, in a graph of its own, and subtracted. Every case is compared with the twin first. The last
line is JSON: medians in microseconds, and the share of the time that reading the table alone would take.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.ops.ngram import propose_ngrams

SHAPES = ((1, 32768), (64, 4096), (256, 4096), (256, 32768))  # rows, tokens
MIN_N, MAX_N, NUM_DRAFTS = 2, 5, 8
SIZES = {"min_n": MIN_N, "max_n": MAX_N, "num_drafts": NUM_DRAFTS}
FLUSH_BYTES = 256 << 20
CALLS_PER_GRAPH = 10
Drafts = tuple[torch.Tensor, torch.Tensor]


def make_text(kind: str, num_rows: int, length: int) -> torch.Tensor:
    """Return token ids, int32 [num_rows, length] on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    if kind == "none":
        return torch.arange(length, dtype=torch.int32, device="cuda").repeat(num_rows, 1)
    if kind == "some":
        return torch.randint(0, 300, (num_rows, length), dtype=torch.int32, device="cuda", generator=generator)
    uniform = torch.rand(num_rows, length, device="cuda", generator=generator)
    return (50_000**uniform).to(torch.int32)  # a token's frequency falls with its number, as words' do


def brute_force(tokens: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> Drafts:
    """Compare every window of every length with the row's end. Full rows only. Drafts are not extended past the end."""
    text = tokens.index_select(0, rows)
    num_rows, length = text.shape
    best = torch.full((num_rows,), -1, dtype=torch.int64, device=text.device)
    for n in range(MIN_N, MAX_N + 1):
        windows = text[:, :-1].unfold(1, n, 1)
        matches = (windows == text[:, -n:].unsqueeze(1)).all(-1)
        ends = torch.arange(n, length, device=text.device)
        found = torch.where(matches, ends, -1).amax(1)
        best = torch.where(found >= 0, found, best)
    is_match = best >= 0
    places = best.clamp(min=0).unsqueeze(1) + torch.arange(NUM_DRAFTS, device=text.device)
    drafts = text.gather(1, places.clamp(max=length - 1))
    return torch.where(is_match.unsqueeze(1), drafts, text[:, -1:]), is_match.to(torch.int32) * NUM_DRAFTS


def graph_us(call: Callable[[], object], flush: torch.Tensor, repeats: int = 30) -> float:
    """Return the median time of a call in a graph, with a cold second-level cache, microseconds."""

    def capture(with_call: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_PER_GRAPH):
                flush.fill_(1)
                if with_call:
                    call()
        return graph

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compile, and let allocations settle
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graphs = capture(True), capture(False)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for graph, of_graph in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            of_graph.append(start.elapsed_time(end) * 1e3 / CALLS_PER_GRAPH)
    return statistics.median(times[0]) - statistics.median(times[1])


def measure(kind: str, num_rows: int, length: int, flush: torch.Tensor, bytes_per_us: float) -> dict[str, object]:
    """Return the figures of one case."""
    from raypp.ops.cuda.ngram_kernel import NgramKernel

    tokens = make_text(kind, num_rows, length)
    rows = torch.randperm(num_rows, device="cuda")
    lengths = torch.full((num_rows,), length, device="cuda")
    kernel = NgramKernel(tokens, window=length, max_rows=num_rows, **SIZES)

    def twin() -> Drafts:
        return propose_ngrams(tokens, rows, lengths, window=length, max_length=length, **SIZES)

    expected = twin()
    for _ in range(2):  # the first call must leave the scratch as it found it
        got = kernel(rows, lengths)
        assert torch.equal(got[0], expected[0]), "drafts differ from the twin's"
        assert torch.equal(got[1], expected[1]), "hits differ from the twin's"
    assert torch.equal(brute_force(tokens, rows, lengths)[1], expected[1]), "brute force finds other rows"
    floor_us = tokens.numel() * tokens.element_size() / bytes_per_us
    kernel_us = graph_us(lambda: kernel(rows, lengths), flush)
    return {
        "kernel_us": kernel_us,
        "twin_us": graph_us(twin, flush),
        "brute_force_us": graph_us(lambda: brute_force(tokens, rows, lengths), flush),
        "read_floor_us": floor_us,
        "share_of_floor": floor_us / kernel_us,
        "hit_rate": float((expected[1] > 0).double().mean()),
    }


def read_rate(flush: torch.Tensor) -> float:
    """Return how fast the GPU moves memory, bytes per microsecond, read and written bytes counted."""
    large = torch.ones(1 << 28, dtype=torch.int32, device="cuda")
    copied = torch.empty_like(large)
    return 2 * large.nbytes / graph_us(lambda: copied.copy_(large), flush, repeats=5)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    bytes_per_us = read_rate(flush)
    figures: dict[str, object] = {"read_gb_per_s": bytes_per_us / 1e3}
    for num_rows, length in SHAPES:
        for kind in ("none", "some", "text"):
            case = f"{num_rows} x {length}, {kind}"
            try:
                figures[case] = measure(kind, num_rows, length, flush, bytes_per_us)
            except Exception as error:  # one case must not stop the others
                figures[case] = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(case, figures[case], flush=True)
    print_report("ngram", dict[str, object](SIZES), figures)


if __name__ == "__main__":
    main()
