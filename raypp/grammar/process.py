"""The grammar process: `python -m raypp.grammar.process FD SETTINGS`, started by `raypp.driver.grammar_process`.

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
from queue import SimpleQueue
from typing import Any

from raypp.errors import RayppError, RequestError
from raypp.grammar.compilers import Compiled, CompilerNursery
from raypp.grammar.message_socket import MessageSocket
from raypp.grammar.messages import GrammarReply, OpenGrammar, Ready, Refused, decode, encode
from raypp.grammar.texts import Texts
from raypp.grammar.vocabulary import VocabularySource


def main(file_descriptor: int, settings: dict[str, Any]) -> None:
    """Serve the driver at the other end of a socket until it is gone."""
    driver = MessageSocket(socket.socket(fileno=file_descriptor))
    sending = threading.Lock()

    def reply(message: GrammarReply) -> None:
        data = encode(message)
        with sending:
            driver.send(data)

    source = VocabularySource(settings["model_path"], settings["vocab_size"], tuple(settings["eos_token_ids"]))
    try:
        vocabulary = source.load()
        nursery = CompilerNursery(vocabulary, settings["compile_timeout_s"])
    except RequestError as error:
        _refuse_all(driver, error)
        return
    texts = Texts(vocabulary, source.vocab_size, nursery.submit, reply)
    reader = ThreadPoolExecutor(1, "deserialize")
    done: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    woken, waker = os.pipe()

    def note(compiled: Compiled, future: Future[Any]) -> None:
        error = future.exception()
        failed = None if error is None else RequestError("a compiled grammar cannot be read", got=str(error)[:300])
        done.put((compiled.source, failed or future.result()))
        os.write(waker, b"!")

    sources = select.epoll()
    for source_of_news in (driver, nursery, woken):
        sources.register(source_of_news, select.EPOLLIN)
    try:
        driver.send(encode(Ready()))
        while True:
            for ready, _ in sources.poll():
                if ready == driver.fileno():
                    for order in driver.receive():
                        texts.handle(decode(order))
                elif ready == woken:
                    os.read(woken, 1)
                    texts.take_compiled(*done.get())
            for compiled in nursery.receive():  # an order may have taken it in, so that nothing is readable
                _read(compiled, texts, reader, note)
    except (EOFError, OSError):
        return  # the driver has ended, or wants another process
    except Exception:
        traceback.print_exc()  # the driver starts another process, and knows no reason
    finally:
        os._exit(0)  # a mask under way holds nobody up


def _read(compiled: Compiled, texts: Texts, reader: ThreadPoolExecutor, note: Any) -> None:
    if isinstance(compiled.result, RayppError):
        texts.take_compiled(compiled.source, compiled.result)
        return
    future = reader.submit(texts.deserialize, compiled.source, compiled.result)
    future.add_done_callback(lambda finished: note(compiled, finished))


def _refuse_all(driver: MessageSocket, error: RequestError) -> None:
    try:
        driver.send(encode(Ready()))
        while True:
            select.select([driver], [], [])
            for order in map(decode, driver.receive()):
                if isinstance(order, OpenGrammar):
                    driver.send(encode(Refused(order.number, error)))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
