"""`python -m raypp`."""

from raypp.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
