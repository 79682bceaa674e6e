"""Runs a measurement in the members of a stage: a process with a GPU each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.transport.open import make_members, open_members
from raypp.transport.rendezvous import Rendezvous, RendezvousServer

Measure = Callable[[Any, torch.device, argparse.Namespace], dict[str, Any]]
"""From the members as one sees them, its device and arguments to figures; a function of a module."""


def run_members(name: str, measure: Measure, args: argparse.Namespace) -> None:
    """Print what the first of `args.members` members has measured; it exits where one fails.

    Args:
        name: Of the report.
        measure: What each does, at the same time.
        args: Of all; see above.
    """
    if torch.cuda.device_count() < args.members:
        sys.exit(f"needs {args.members} GPUs, this machine has {torch.cuda.device_count()}")
    server = RendezvousServer()
    context = mp.get_context("spawn")
    results: Any = context.SimpleQueue()
    ranks = range(args.members)
    processes = [context.Process(target=_run, args=(rank, measure, args, server.address, results)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        if process.exitcode:
            sys.exit(f"a member ended with {process.exitcode}")
    print_report(name, vars(args), results.get(), {})


def _run(rank: int, measure: Measure, args: argparse.Namespace, address: Rendezvous, results: Any) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    members = make_members(0, rank, args.members, device)
    assert members is not None
    open_members(members, 0, address, own_host="127.0.0.1", open_timeout_s=60.0, deadline_s=60.0)
    with torch.inference_mode():
        figures = measure(members, device, args)
    if rank == 0:
        results.put(figures)
    members.close()
