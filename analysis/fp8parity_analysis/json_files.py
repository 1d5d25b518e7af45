"""JSON documents on disk, without pandas: the command line reads and writes them before it needs any table."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8parity_analysis.errors import BadInputError


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON through a temporary name and a rename, so that a reader never sees half a file."""
    # a name of its own per process: the runs of a study may write the same file at the same time
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as handle:
            json.dump(document, handle, indent=1, sort_keys=False, allow_nan=True)
            handle.write("\n")
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; `BadInputError` names the file when it is missing, unreadable or no object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise BadInputError(f"{path}: is not JSON ({error}); was it written by fp8parity?") from error
    if not isinstance(document, dict):
        raise BadInputError(f"{path}: holds a {type(document).__name__}, expected an object")
    return document
