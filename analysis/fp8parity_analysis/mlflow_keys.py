"""Names that MLflow takes as keys of metrics, parameters and tags. Pure; imports no mlflow."""

from __future__ import annotations

import hashlib
import posixpath
import re

_FORBIDDEN = re.compile(r"[^\w\-. :/]")
_KEPT = 200
"""Characters of a name that is cut: MLflow takes 250, the digest and what stands before the name are added."""


def allowed_key(name: str) -> str:
    """Return `name`, or what MLflow takes instead of it: `_` for each other character, and a digest of the original.

    MLflow's rule (`mlflow.utils.validation`, 3.x): letters, digits, `_-. :/`, a path in its shortest form that leads
    neither up nor to the root, at most 250 characters.
    """
    plain = _FORBIDDEN.sub("_", name)
    if posixpath.normpath(plain) != plain or plain.startswith((".", "/")):
        plain = plain.replace("/", "_").lstrip(".")
    if name and plain == name and len(name) <= _KEPT:
        return name
    return f"{plain[:_KEPT] or '_'}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:4]}"
