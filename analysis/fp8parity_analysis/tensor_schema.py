"""Columns of the tensor statistics in a run directory: the contract between the probe that writes and what reads.

`tensor_stats/part-NNNNN.parquet` holds one row per (step, linear, GEMM, operand, cast), and
`tensor_stats/signals-NNNNN.parquet` one row per (step, signal, module). Both carry `TENSOR_SCHEMA_VERSION` in the
Parquet metadata under `METADATA_KEY`. A part is written whole and renamed into place, so that every part present can
be read after a kill; rows of a step that a resumed run trains again appear once, for the later writing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

TENSOR_SCHEMA_VERSION = 1
METADATA_KEY = b"fp8parity.tensor_schema_version"

CAST_PARTS = "part-*.parquet"
SIGNAL_PARTS = "signals-*.parquet"

TRAINED = "trained"
WHAT_IF = "what_if"
"""`kind` of a row: the cast that training used, or a cast of the same tensor that training did not use."""

KEY_COLUMNS = ("step", "tokens", "fqn", "gemm", "operand", "recipe", "kind", "format", "granularity")
"""`step` counts from 1 as in the curve: the state after that many optimizer steps is what was probed. `gemm` is
`output`, `grad_input` or `grad_weight`; `operand` is `input`, `weight` or `grad_output`; `recipe` names the cast's
recipe."""

COUNT_COLUMNS = (
    "element_count",
    "group_count",
    "zero_count",
    "nonfinite_count",
    "underflow_count",
    "subnormal_count",
    "saturated_count",
    "zero_amax_groups",
)
"""Elements, except `group_count` and `zero_amax_groups`, which count scaling groups. int64."""

VALUE_COLUMNS = (
    "amax",
    "group_amax_min",
    "group_amax_median",
    "scale_min",
    "scale_max",
    "zero_frac",
    "underflow_frac",
    "subnormal_frac",
    "saturated_frac",
    "relative_error",
    "sqnr_db",
    "lost_l1_frac",
    "lost_l2_frac",
    "dynamic_range_bits",
    "rms",
    "amax_over_rms",
)
"""float64; NaN where undefined (no non-zero element, say). `underflow_frac`, `subnormal_frac` and `saturated_frac` are
shares of the finite non-zero elements, `zero_frac` of all elements."""

CAST_COLUMNS = KEY_COLUMNS + COUNT_COLUMNS + VALUE_COLUMNS

SIGNAL_COLUMNS = ("step", "tokens", "signal", "fqn", "value")
SIGNALS = ("head_logits_max", "head_logsumexp_mean", "attention_logits_max", "block_output_rms", "grad_norm")
"""`fqn` is the module the signal belongs to; `grad_norm` is the L2 norm of that linear's weight gradient."""

TEXT_COLUMNS = ("fqn", "gemm", "operand", "recipe", "kind", "format", "granularity", "signal")
WHOLE_COLUMNS = ("step", "tokens", *COUNT_COLUMNS)
"""Columns that hold text, and int64; all others hold float64."""

ALERT_KEYS = ("step", "rule", "fqn", "gemm", "operand", "value", "limit")
"""Keys of one entry of the manifest's `alerts`."""


def arrow_schema(columns: Sequence[str]) -> Any:
    """Return the `pyarrow.Schema` of `columns`, with which parts are written and read."""
    import pyarrow as pa  # takes a moment, and most that import this module read no Parquet

    kinds = {**dict.fromkeys(TEXT_COLUMNS, pa.string()), **dict.fromkeys(WHOLE_COLUMNS, pa.int64())}
    return pa.schema([pa.field(name, kinds.get(name, pa.float64())) for name in columns])
