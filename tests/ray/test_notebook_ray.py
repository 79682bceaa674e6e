"""The notebook runs from a fresh kernel; interrupting a cell aborts, and running the starting cell again replaces."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator

import pytest
import ray
from batch_jobs import DEADLINE_S
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from leftovers import wait_until_gone
from run_notebook import pictures, run_notebook
from sizes import sized

pytestmark = pytest.mark.ray


@pytest.mark.full
def test_the_notebook_runs_and_draws(local_ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    notebook = run_notebook()
    drawn = pictures(notebook)
    assert set(drawn) == {"timeline", "timeline-one-request"}
    assert all(png.startswith(b"\x89PNG") for png in drawn.values())
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert said.count("bubble fraction") == 2
    assert "of the physical limit" in said
    tables = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "text/html" in output.get("data", {})
    ]
    assert len(tables) == 3


class Kernel:
    """A fresh kernel, and a notebook's way of running cells in it."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager = manager
        self._client = client

    def run(self, cell: str, on_output: Callable[[str], None] = lambda _: None) -> str:
        """Run a cell; return what it printed, or the name of the error that ended it."""
        message_id = self._client.execute(cell)
        printed = ""
        while True:
            message = self._client.get_iopub_msg(timeout=DEADLINE_S)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed += content["text"]
                on_output(printed)
            elif message["msg_type"] == "error":
                printed += content["ename"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return printed

    def run_and_interrupt(self, cell: str, when: str) -> str:
        """Run a cell, and interrupt it when it has printed something."""
        interrupted: list[str] = []

        def interrupt(printed: str) -> None:
            if when in printed and not interrupted:
                interrupted.append(printed)
                self._manager.interrupt_kernel()

        return self.run(cell, interrupt)


@pytest.fixture
def kernel(local_ray) -> Iterator[Kernel]:
    manager = KernelManager(kernel_name="python3", transport="ipc")
    manager.start_kernel(env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=DEADLINE_S)
    yield Kernel(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


START = """
from raypp import LLM, SamplingParams
llm = LLM("tiny", num_stages={num_stages})
"""
LONG = "SamplingParams(max_tokens=4000, ignore_eos=True)"
GENERATE = f"""
import threading, time
def tell():
    while llm.stats()["num_running"] < 2:
        time.sleep(0.01)
    print("running", flush=True)
threading.Thread(target=tell).start()
llm.generate(["a", "b"], {LONG})
"""
STREAM = f"""
for output in llm.stream("a", {LONG}):
    print("running", flush=True)
"""
PROCESSES = "import json; print(json.dumps(llm.processes()))"


def test_interrupting_aborts_and_starting_again_replaces(kernel: Kernel) -> None:
    assert kernel.run(START.format(num_stages=sized(1, 2))) == ""
    for cell in (GENERATE, STREAM):
        assert kernel.run_and_interrupt(cell, "running").endswith("KeyboardInterrupt")
        ends = time.monotonic() + DEADLINE_S
        while (num_running := kernel.run('print(llm.stats()["num_running"])').strip()) != "0":
            assert time.monotonic() < ends, num_running
    first = json.loads(kernel.run(PROCESSES))

    assert kernel.run(START.format(num_stages=1)) == ""
    second = json.loads(kernel.run(PROCESSES))
    assert len(second["stages"]) == 1
    assert second["driver"] != first["driver"]
    assert not wait_until_gone([first["driver"], *first["stages"]], 20.0)
    assert kernel.run('print(len(llm.generate("def ")))') == "1\n"
    kernel.run("llm.close()")
