"""`python -m raypp.batch`: `raypp batch`, for `ray job submit` and wherever else the command is not in the PATH."""

import sys

from raypp.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["batch", *sys.argv[1:]]))
