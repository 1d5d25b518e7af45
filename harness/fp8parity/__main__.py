"""`python -m fp8parity`."""

from fp8parity.cli import main

main()
