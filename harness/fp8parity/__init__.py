"""Make the two curves: paired BF16 and FP8 training runs from one recipe file."""

__version__ = "0.1.0"
