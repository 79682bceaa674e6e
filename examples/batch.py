"""Write a file of requests, run it as a batch job, and read the answers.

    python examples/batch.py [FOLDER]

A job that was killed goes on where it was when the same command is run again. docs/batch.md has the formats.
"""

import json
import sys
import tempfile
from pathlib import Path

from raypp.cli.main import main

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    requests, answers = folder / "requests.jsonl", folder / "answers.jsonl"
    lines = [{"custom_id": f"function {i}", "prompt": f"def function_{i}(", "max_tokens": 8} for i in range(20)]
    lines += [{"custom_id": "a chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))

    # In a shell: raypp batch tiny --num-stages 2 --input requests.jsonl --output answers.jsonl
    status = main(["batch", "tiny", "--num-stages", "2", "--input", str(requests), "--output", str(answers)])
    for line in answers.read_text().splitlines():  # in the order in which they were ready
        answer = json.loads(line)
        choice = answer["response"]["body"]["choices"][0]
        print(f"{answer['custom_id']}: {choice['text'] if 'text' in choice else choice['message']['content']!r}")
    sys.exit(status)
