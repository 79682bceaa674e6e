"""Memory of large bodies and pictures goes back to the system."""

import re
import subprocess
import sys

import pytest

PROGRAM = """
import re
from serve_app.replica import give_back_freed_memory

def rss_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10

give_back_freed_memory()
for size in range(1, 32):  # each raises glibc's own limit
    large = bytearray(b"1" * (size << 20))
large, small = [], []
for _ in range(12):
    large.append(bytearray(b"1" * (8 << 20)))
    small.append(bytes(1000))  # lies behind it
before = rss_mib()
large = None
print(before, rss_mib())
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_blocks_are_unmapped_when_they_are_freed():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    before, after = map(int, re.findall(r"\d+", done.stdout))
    assert before - after >= 90
