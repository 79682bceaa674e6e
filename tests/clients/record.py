"""Record clients: `python tests/clients/record.py [--environments FOLDER] [NAME ...]`.

Each client gets an environment of its own under FOLDER, which is kept and used again. It runs its program of
tests/clients/programs against an app of this checkout in this process, and leaves tests/clients/recordings/NAME.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "unit" / "serve_app"))

from client_packages import CLIENTS, Environment
from recorder import ENGINE, Recorder, save
from running_app import running_app


def answer_of(exchange: dict[str, Any]) -> str:
    """Return what was asked for, and the status; an exchange without an answer was broken off."""
    return f"{exchange.get('path')} {exchange.get('answer', {}).get('status')}" if exchange else "no answer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; by default all")
    parser.add_argument("--environments", type=Path, default=Path(".venv/clients"), help="where packages are installed")
    given = parser.parse_args()
    failed = False
    for name in given.clients or CLIENTS:
        environment = Environment(CLIENTS[name], given.environments.absolute() / name)
        exchanges: list[dict[str, Any]] = []
        with running_app(wrap=lambda app, kept=exchanges: Recorder(app, kept), **ENGINE) as app:
            try:
                environment.run(f"{app.url}/v1")
            except RuntimeError as error:
                print(error, [answer_of(exchange) for exchange in exchanges], sep="\n", file=sys.stderr)
                failed = True
                continue
        path = save(name, environment.versions(), exchanges)
        print(f"{name}: {len(exchanges)} exchanges in {path.stat().st_size / 1024:.0f} KiB")
    sys.exit(failed)


if __name__ == "__main__":
    main()
