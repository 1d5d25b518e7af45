"""The base of every record of a specification."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A record that cannot be changed and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
