"""How fast KV blocks go to CPU memory and come back, and what a batch of them takes of the host.

    python benchmarks/micro/block_copies.py --blocks 1 8 32 128 512
    python benchmarks/micro/block_copies.py --device cpu --layers 2 --held 64

Blocks of 16 tokens of Qwen3-8B, in half of its layers. `run`: their places in CPU memory are neighbours, as of blocks
that went there together; `scattered`: any places. GB/s are of the whole batch; `host ms` is how long the call takes,
which queues it and waits for nothing. The last column is one batch out and one in beside matrix products, over the
products alone: what a step that runs beside copies loses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from raypp.ops.device_kernels import open_block_store
from raypp.ops.kv_cache import allocate_layer_cache, sides

_BLOCK_SIZE, _HEADS, _HEAD_DIM = 16, 8, 128
_REPEATS = 5


def settled(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the median seconds until the device is done, and those until the call returns."""
    done, returned = [], []
    for _ in range(_REPEATS):
        settled(device)
        began = time.perf_counter()
        call()
        returned.append(time.perf_counter() - began)
        settled(device)
        done.append(time.perf_counter() - began)
    return float(np.median(done)), float(np.median(returned))


def slowdown(batch: Callable[[], None], seconds: float, device: torch.device) -> float:
    """Return how much longer products take beside a batch in a stream of its own; they last about as long as it."""
    if device.type != "cuda":
        return float("nan")
    x = torch.randn(2048, 4096, device=device, dtype=torch.bfloat16)
    w = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    one_s, _ = timed(lambda: [x @ w for _ in range(20)] and None, device)
    count, copying = max(1, round(20 * seconds / one_s)), torch.cuda.Stream(device)
    steps, begun, ended = torch.cuda.current_stream(device), *(torch.cuda.Event(enable_timing=True) for _ in "ab")
    taken = []
    for is_beside in (False, True):
        settled(device)
        if is_beside:
            with torch.cuda.stream(copying):
                batch()
        begun.record(steps)
        for _ in range(count):
            x @ w
        ended.record(steps)
        settled(device)
        taken.append(begun.elapsed_time(ended))
    return taken[1] / taken[0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--held", type=int, default=2048, help="blocks of the caches, and twice as many in CPU memory")
    parser.add_argument("--staged-mib", type=int, default=32, help="that a GPU holds of blocks on their way")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 8, 32], help="of a batch")
    args = parser.parse_args()
    device, rng = torch.device(args.device), np.random.default_rng(0)
    sizes = (args.held, _BLOCK_SIZE, _HEADS, _HEAD_DIM, _HEAD_DIM)
    caches = [allocate_layer_cache(*sizes, torch.bfloat16, device) for _ in range(args.layers)]
    block_bytes = sum(side.nbytes for side in sides(caches)) // args.held
    began = time.perf_counter()
    store = open_block_store(caches, 2 * args.held, max(1, (args.staged_mib << 20) // block_bytes))
    print(f"{2 * args.held * block_bytes / 2**30:.1f} GiB of CPU memory ready in {time.perf_counter() - began:.1f} s")
    print(f"a block: {block_bytes / 1e6:.2f} MB")
    print("blocks  places       out GB/s   in GB/s  out host ms  in host ms  products beside")
    for count in args.blocks:
        blocks = rng.permutation(np.arange(1, args.held))[:count].astype(np.int32)
        for name, places in (
            ("run", np.arange(7, 7 + count, dtype=np.int32)),
            ("scattered", rng.permutation(2 * args.held)[:count].astype(np.int32)),
        ):

            def out(blocks: np.ndarray = blocks, places: np.ndarray = places) -> None:
                store.copy_out(blocks, places)

            def back(blocks: np.ndarray = blocks, places: np.ndarray = places) -> None:
                store.copy_in(blocks, places)

            def both(out: Callable[[], None] = out, back: Callable[[], None] = back) -> None:
                out()
                back()

            both()  # what is made when it is first needed is made
            (out_s, out_host_s), (in_s, in_host_s) = timed(out, device), timed(back, device)
            size, beside = count * block_bytes / 1e9, slowdown(both, out_s + in_s, device)
            print(
                f"{count:6}  {name:<10} {size / out_s:9.1f} {size / in_s:9.1f} {out_host_s * 1e3:12.3f}"
                f" {in_host_s * 1e3:11.3f} {beside:16.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
