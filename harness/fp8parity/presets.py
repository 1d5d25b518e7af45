"""Named model sizes. Widths are multiples of 128, so that every recipe, block-scaled ones too, is legal.

The names count parameters with a byte vocabulary (272 rows) below 100 M and with 32 768 rows, untied, from
`125m` up; `tests/harness/test_model.py` holds each name to within 15 % of its count.
"""

from __future__ import annotations

# name: dim, n_layers, n_heads, n_kv_heads, ffn_dim
_SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "0.7m": (128, 4, 4, 2, 256),
    "4m": (256, 5, 4, 4, 768),
    "25m": (512, 8, 8, 8, 1408),
    "125m": (768, 10, 12, 12, 2048),
    "350m": (1024, 22, 16, 16, 2816),
    "1b": (2048, 16, 16, 16, 5632),
    "3b": (3072, 26, 24, 8, 8192),
    "8b": (4096, 32, 32, 8, 14336),
}

PRESETS: tuple[str, ...] = tuple(_SIZES)


def preset_fields(name: str) -> dict[str, int]:
    """Return the sizes of a preset; `ValueError` lists the known names."""
    if name not in _SIZES:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    dim, n_layers, n_heads, n_kv_heads, ffn_dim = _SIZES[name]
    return {
        "dim": dim,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "ffn_dim": ffn_dim,
    }
