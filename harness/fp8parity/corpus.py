"""Whether a token file is long enough for a run, by its side file alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp8parity.precision_rules import Problem
from fp8parity.spec import DataSpec, RunSpec
from fp8parity.token_meta import TokenMeta


def corpus_problems(spec: RunSpec, meta: TokenMeta, path: Path) -> Iterator[Problem]:
    """Yield what the token file `path` is too short for, as ((section, key), message): a batch, the held-out set.

    As `data.BatchPlan` and `data.held_out_rows` count: one window per epoch is given up to its random offset.
    """
    train = spec.train
    windows = max(0, (meta.train_tokens - 1) // train.context - 1)
    if windows < train.batch_size:
        words = (
            f"{path}: {meta.train_tokens} training tokens make {windows} windows of train.context {train.context}, "
            f"fewer than train.batch_size {train.batch_size}; use a larger corpus, or a smaller context or batch_size"
        )
        yield ("train", "batch_size" if windows else "context"), words
    held_out_tokens = meta.n_tokens - meta.train_tokens
    held_out = max(0, (held_out_tokens - 1) // train.context)
    if held_out < train.eval_sequences:
        words = (
            f"{path}: {held_out_tokens} held-out tokens make {held_out} sequences of train.context {train.context}, "
            f"fewer than train.eval_sequences {train.eval_sequences}; {_more_held_out(spec)}, or write fewer sequences"
        )
        yield ("train", "eval_sequences" if held_out else "context"), words


def _more_held_out(spec: RunSpec) -> str:
    """Say what gives data of this source a larger held-out part."""
    if isinstance(spec.data, DataSpec) and spec.data.source == "bin":
        return "pack it again with a larger --held-out-fraction or more text (fp8parity data pack)"
    return "use more data or a larger data.held_out_fraction"
