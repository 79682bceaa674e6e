"""The grammar process: `python -m raypp.grammar.process FD BOARD_FD SETTINGS`, of `raypp.driver.grammar_process`.

Beside the driver, not in it: xgrammar comes with torch, seconds of imports and hundreds of megabytes that the driver
does without; and whatever a grammar does to its process, the driver starts a new one.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

from raypp.errors import RayppError, RequestError
from raypp.grammar.board import Board
from raypp.grammar.compilers import CompilerNursery
from raypp.grammar.grammar_messages import CompileGrammar, GrammarReply, NotCompiled, Ready, decode, encode, key_of
from raypp.grammar.message_socket import MessageSocket
from raypp.grammar.texts import Texts
from raypp.grammar.vocabulary import VocabularySource


class GrammarServer:
    """Serves the driver at the other end of a socket until it is gone."""

    def __init__(self, driver: MessageSocket, board: Board, settings: dict[str, Any]) -> None:
        """Load the model's vocabulary. Nobody may have started a thread.

        Raises:
            RequestError: there is none.
        """
        source = VocabularySource(settings["model_path"], settings["vocab_size"], tuple(settings["eos_token_ids"]))
        vocabulary = source.load()
        self._driver = driver
        self._sending = threading.Lock()
        self._nursery = CompilerNursery(vocabulary, settings["compile_timeout_s"])
        self._texts = Texts(vocabulary, source.vocab_size, self._nursery.submit, self._reply, board)
        self._deserializer = ThreadPoolExecutor(1, "deserialize")
        self._deserialized: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._woken, self._waker = os.pipe()
        self._sources = select.epoll()
        for source_of_news in (driver, self._nursery, self._woken):
            self._sources.register(source_of_news, select.EPOLLIN)

    def run(self) -> None:
        """Serve; the process ends with this."""
        self._reply(Ready())
        self._texts.makers.watch(lambda: threading.Thread(target=self._read_orders, name="reader").start())

    def _read_orders(self) -> None:
        """Be the reader, until another thread is, or the driver is gone."""
        try:
            while self._texts.makers.make_due():
                self._wait_for_news()
            return  # another thread reads now
        except (EOFError, OSError):
            pass  # the driver has ended, or wants another process
        except Exception:
            traceback.print_exc()  # the driver starts another process, and knows no reason
        os._exit(0)  # a mask under way holds nobody up

    def _wait_for_news(self) -> None:
        for ready, _ in self._sources.poll():
            if ready == self._driver.fileno():
                for order in self._driver.receive():
                    self._texts.handle(decode(order))
            elif ready == self._woken:
                os.read(self._woken, 1)
                self._texts.take_compiled(*self._deserialized.get())
        for outcome in self._nursery.receive():  # an order may have taken it in, so that nothing is readable
            if isinstance(outcome.result, RayppError):
                self._texts.take_compiled(outcome.source, outcome.result)
            else:
                future = self._deserializer.submit(self._texts.deserialize, outcome.source, outcome.result)
                future.add_done_callback(partial(self._note, outcome.source))

    def _note(self, source: str, future: Future[Any]) -> None:
        error = future.exception()
        failed = None
        if error is not None:
            failed = RequestError("a compiled grammar cannot be read", got=str(error)[:300], param="structured_outputs")
        self._deserialized.put((source, failed or future.result()))
        os.write(self._waker, b"!")

    def _reply(self, message: GrammarReply) -> None:
        data = encode(message)
        with self._sending:
            self._driver.send(data)


def main(file_descriptor: int, board_descriptor: int, settings: dict[str, Any]) -> None:
    """Serve the driver at the other end of a socket until it is gone."""
    driver = MessageSocket(socket.socket(fileno=file_descriptor))
    try:
        server = GrammarServer(driver, Board(board_descriptor), settings)
    except RequestError as error:
        _refuse_all(driver, error)
    else:
        server.run()


def _refuse_all(driver: MessageSocket, error: RequestError) -> None:
    try:
        driver.send(encode(Ready()))
        while True:
            select.select([driver], [], [])
            for order in map(decode, driver.receive()):
                if isinstance(order, CompileGrammar):
                    driver.send(encode(NotCompiled(key_of(order.source), error)))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
