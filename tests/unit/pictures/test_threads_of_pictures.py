"""The threads that decode pictures step aside for who serves."""

import asyncio
import os
import sys
import threading

import pytest

from raypp.config.sections import ImagesSection
from raypp.pictures.fetch import Fetcher
from raypp.pictures.reader import ImageThreads


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_decoding_has_a_lower_priority_than_the_rest_of_the_process():
    beside = ImageThreads(Fetcher(ImagesSection()))

    def niceness(messages: object) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert asyncio.run(beside.messages([], niceness)) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
