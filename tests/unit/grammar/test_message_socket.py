"""Messages arrive whole and in order, however large; an end that is gone, or takes nothing, is noticed."""

from __future__ import annotations

import select
import socket
import threading

import pytest

from raypp.errors import DeadlineError
from raypp.grammar.message_socket import MessageSocket


def pair() -> tuple[MessageSocket, MessageSocket]:
    ours, theirs = socket.socketpair()
    return MessageSocket(ours), MessageSocket(theirs)


def received(end: MessageSocket, count: int) -> list[bytes]:
    messages = end.receive()
    while len(messages) < count:
        assert select.select([end], [], [], 60)[0], "nothing came"
        messages += end.receive()
    return messages


def test_messages_of_any_size_arrive_in_order() -> None:
    one, other = pair()
    messages = [b"", b"a", bytes(range(256)) * 40, b"x" * 3_000_000, b"last"]
    sender = threading.Thread(target=lambda: [one.send(message) for message in messages])
    sender.start()
    assert received(other, len(messages)) == messages
    sender.join()
    assert other.receive() == []


def test_two_ends_that_both_send_much_wait_for_neither() -> None:
    one, other = pair()
    messages = [b"%d" % index * 50_000 for index in range(100)]
    got: dict[MessageSocket, list[bytes]] = {}

    def talk(end: MessageSocket) -> None:
        for message in messages:  # much more than fits in between
            end.send(message, 60.0)
        got[end] = received(end, len(messages))

    talkers = [threading.Thread(target=talk, args=(end,)) for end in (one, other)]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join()
    assert got == {one: messages, other: messages}


def test_who_is_gone_is_noticed_once_all_was_read() -> None:
    one, other = pair()
    one.send(b"farewell")
    one.close()
    assert other.receive() == [b"farewell"]
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError, match=r"pipe|reset"):
        other.send(b"too late", 1.0)


def test_who_takes_nothing_is_given_up_though_it_talks() -> None:
    one, other = pair()
    other.send(b"hello")
    with pytest.raises(DeadlineError, match="takes no messages"):
        one.send(b"x" * 50_000_000, 0.05)
    assert one.receive() == [b"hello"]
