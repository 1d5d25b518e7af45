"""The exceptions that reach the command line, each with its exit code and a one-line reason."""

from __future__ import annotations

EXIT_INVALID = 12
EXIT_DIVERGED = 20
EXIT_USAGE = 64
EXIT_INTERRUPTED = 75


class Fp8ParityError(Exception):
    """A failure the user can act on; the message names the place and the remedy, and no traceback is shown."""

    exit_code: int = 1


class UsageError(Fp8ParityError):
    """Bad input or usage: a recipe file, a path, an option, an unsupported combination."""

    exit_code = EXIT_USAGE


class ExecutionMismatchError(Fp8ParityError):
    """A run does not execute the precision it declares; what it would measure is not what was asked."""

    exit_code = EXIT_INVALID


class KernelFaultError(Fp8ParityError):
    """The FP8 arithmetic of this machine is wrong; what any run would measure here is the fault."""

    exit_code = EXIT_INVALID


class InterruptedRunError(Fp8ParityError):
    """Stopped from outside or by a full disk; the same command run again resumes."""

    exit_code = EXIT_INTERRUPTED
