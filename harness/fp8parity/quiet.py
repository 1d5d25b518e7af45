"""Silences what torchao, torch and Lightning say at every start and the user cannot act on. Imports no torch."""

from __future__ import annotations

import logging
import os
import warnings
from functools import partial

QUIET_ENVIRONMENT = {"TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}
"""Keeps torchao from loading libraries of kernels that no recipe here uses, and from saying that it could not."""

_LEVELS = {"lightning.pytorch": logging.WARNING}

_LINES = {
    "torchao": "Skipping import of cpp extensions",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}
"""By logger, what importing torchao says: that it was kept from its libraries, and torch 2.13 of one of its classes."""

_MESSAGES = (
    ".*does not have many workers.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*lr_scheduler.step.*before.*optimizer.step.*",
    ".*Found .* module.* in eval mode.*",
)


def _is_other(line: str, record: logging.LogRecord) -> bool:
    return line not in record.getMessage()


_FILTERS = {logger: partial(_is_other, line) for logger, line in _LINES.items()}


def be_quiet() -> None:
    """Silence it in this process, before torchao is imported; everything else still shows."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for logger, level in _LEVELS.items():
        logging.getLogger(logger).setLevel(level)
    for logger, only_others in _FILTERS.items():
        logging.getLogger(logger).addFilter(only_others)
    for message in _MESSAGES:
        warnings.filterwarnings("ignore", message=message)
