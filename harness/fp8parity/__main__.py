"""`python -m fp8parity`."""

import os
import sys

from fp8parity.cli import main

# Python put the current folder first; the command `fp8parity` and its workers do not look there for modules
if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]
main()
