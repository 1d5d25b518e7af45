"""The one exception of the analysis that a user can act on."""

from __future__ import annotations


class BadInputError(ValueError):
    """Curves, run directories or options that cannot be judged; the message names the place and the remedy."""
