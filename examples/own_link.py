"""Join the stages by a link of your own, here a pipe. The whole engine runs in this process, one thread per stage.

    python examples/own_link.py

A link between host memories needs a `Connection`, which moves the bytes of one slot; raypp's ring of slots does the
rest. docs/architecture.md, "Where do I put...", names the files that make it a value of the setting `transport`.
"""

import contextlib
import multiprocessing
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from raypp import LLM, SamplingParams
from raypp.errors import DeadlineError, EngineDeadError
from raypp.testing import launch_in_threads
from raypp.transport.host.ring import RingReceiver, RingSender


class PipeConnection:
    """One end of a pipe. Its thread moves one message after the other, so that the stage need not wait."""

    def __init__(self, pipe):
        self._pipe, self._thread = pipe, ThreadPoolExecutor(1)

    def send(self, tensor, tag):
        return self._thread.submit(self._pipe.send_bytes, tensor.numpy())

    def recv(self, tensor, tag):
        return self._thread.submit(self._pipe.recv_bytes_into, tensor.numpy())

    def wait(self, transfer: Future, what: str, deadline_s=None):
        try:
            transfer.result(deadline_s or 60.0)
        except TimeoutError as error:
            raise DeadlineError(f"{what} the other stage took too long") from error
        except (OSError, EOFError) as error:
            raise EngineDeadError(f"the link broke while {what} the other stage") from error

    def abort(self):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # ends waits at both ends

    def close(self):
        self.abort()
        self._thread.shutdown()
        self._pipe.close()


def open_edge(edge):
    sending, receiving = map(PipeConnection, multiprocessing.Pipe())
    slots = edge.num_slots, edge.slot_bytes
    return RingSender(sending, *slots), RingReceiver(receiving, *slots)


if __name__ == "__main__":
    with LLM("tiny", num_stages=2, launch=partial(launch_in_threads, open_edge=open_edge)) as llm:
        [output] = llm.generate("def main(", SamplingParams(max_tokens=32, temperature=0.0))
    print(output.outputs[0].text)
