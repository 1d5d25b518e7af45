"""torchao's block-scaled linear (torchao.prototype.blockwise_fp8_training, 0.18): a prototype, Hopper only.

It needs CUDA, Triton and compute capability 9.0: only `tests/gpu` runs it. Its casts are those of the
`blockwise` recipe of `casts.py`, which the other tests compare with the PyTorch references in torchao's
source. `effective.effective_differences` says on the machine itself whether the
layer computes what is declared.

torchao's module multiplies in bf16 only, takes no bias, needs multiples of 128 throughout and, like its
float8 module, knows no autocast of its own; the subclass casts input and weight to the compute dtype first.

torchao tunes each of its five quantisation kernels over up to 45 tiles at the first use of every size, minutes
before the first step of a model. A tile cannot change a code: a group's amax and scale do not depend on how
many groups a program handles (`tests/gpu/test_blockwise_kernels.py` compares all tiles). So each kernel is
given one of torchao's own tiles, chosen for Hopper: 128-byte rows of loads and stores, no spilled register,
1024 threads per multiprocessor.

torchao's kernels turn a NaN into a finite number: `tl.max` and `tl.clamp` become `max.f32` and `min.xorsign.abs.f32`,
which return the operand that is no NaN, so a diverged run would train on. `pass_on_non_finite` corrects the one line
that takes the amax: a group with an inf or NaN gets a NaN scale, as in `casts.py`, and the GEMM multiplies by it.
No read, write or launch is added.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8parity.errors import UsageError
from fp8parity.precision_rules import require_backend
from fp8parity.version_gates import AMD_REFUSED

if TYPE_CHECKING:
    from fp8parity.spec import PrecisionSpec

MULTIPLE = 128

Tile = tuple[dict[str, int], int, int]
"""A Triton configuration: keyword arguments, warps, stages."""

TILES: dict[str, Tile] = {
    "triton_fp8_blockwise_act_quant_lhs_kernel": ({"NUM_GROUPS": 32}, 4, 2),
    "triton_fp8_blockwise_act_quant_rhs_kernel": ({"NUM_GROUPS": 64}, 8, 2),
    "triton_fp8_blockwise_act_quant_transposed_lhs_kernel": ({"NUM_GROUPS": 64}, 8, 2),
    "triton_fp8_blockwise_weight_quant_rhs_kernel": ({}, 8, 2),
    "triton_fp8_blockwise_weight_quant_transposed_rhs_kernel": ({}, 8, 2),
}
"""The tile each quantisation kernel runs with; `benchmarks/blockwise_tiles.py` times all of torchao's."""


def fix_tiles(kernels: Any) -> None:
    """Leave each quantisation kernel of torchao's module its tile of `TILES`, so that nothing is tuned.

    Repeatable. Raises `UsageError` when torchao no longer offers a kernel or its tile.
    """
    for name, tile in TILES.items():
        kernel = getattr(kernels, name, None)
        offered = getattr(kernel, "configs", [])
        kept = [c for c in offered if (dict(c.kwargs), c.num_warps, c.num_stages) == tile]
        if not kept:
            raise UsageError(
                f"precision.backend: torchao_blockwise expects torchao 0.18's kernel {name} with the tile {tile}, "
                "this torchao does not offer it; install torchao 0.18, or write backend: reference"
            )
        assert kernel is not None
        kernel.configs = kept[:1]


_AMAX = re.compile(
    r"^( *)amax = tl\.clamp\(tl\.max\(tl\.abs\(x\)((?:, axis=[01])?)\), min=EPS, max=float\(\"inf\"\)\)"
    r"\.to\(tl\.float64\)$",
    re.MULTILINE,
)
"""How torchao 0.18 takes the amax in each quantisation kernel."""

_NAN_SCALE = "amax = tl.where(top < float('inf'), amax, float('nan'))"

# As integers, the bits of |x| are ordered as the numbers are, with inf and then NaN above them: one maximum finds both.
# Not max.NaN, beside which Triton misplaces transposed FP8 stores (triton-lang/triton issue 11111).
_CORRECTED = (
    r"\1top = tl.max(tl.abs(x).to(tl.float32).to(tl.int32, bitcast=True)\2).to(tl.float32, bitcast=True)\n"
    r"\1amax = tl.clamp(top, min=EPS, max=float('inf')).to(tl.float64)\n"
    rf"\1{_NAN_SCALE}"
)


def pass_on_non_finite(kernels: Any) -> None:
    """Let each quantisation kernel of torchao's module give a group that holds an inf or NaN a NaN scale.

    Repeatable; finite operands get the codes and scales they had. Raises `UsageError` when a kernel takes its amax
    in another way than torchao 0.18's.
    """
    for name in TILES:
        source = getattr(kernels, name).fn  # the JIT function under the tuner
        if _NAN_SCALE in source.src:
            continue
        corrected, found = _AMAX.subn(_CORRECTED, source.src)
        if found != 1:
            raise UsageError(
                f"precision.backend: torchao_blockwise expects torchao 0.18's kernel {name}, this torchao takes the "
                "amax in another way, which may turn a NaN into a finite number; install torchao 0.18, or write "
                "backend: reference"
            )
        # Triton's way to change a kernel; the compiler and every compile cache read the source from here
        source._unsafe_update_src(corrected)


def _import_linear() -> Any:
    """Import torchao's module, which imports Triton at its top; `UsageError` says what is missing."""
    if torch.version.hip is not None:  # MI300 calls itself compute capability 9.4
        raise UsageError(AMD_REFUSED.format(backend="torchao_blockwise"))
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        found = "no CUDA device"
        if torch.cuda.is_available():
            found = f"{torch.cuda.get_device_name()} ({torch.cuda.get_device_capability()})"
        raise UsageError(
            "precision.backend: torchao_blockwise needs an NVIDIA GPU of compute capability 9.0 (Hopper), "
            f"found {found}; write backend: reference to emulate the recipe"
        )
    try:
        from torchao.prototype.blockwise_fp8_training import kernels, linear
    except ImportError as error:
        raise UsageError(
            f"precision.backend: torchao_blockwise cannot be imported ({error}); install Triton and torchao "
            "0.18, or write backend: reference"
        ) from error
    fix_tiles(kernels)
    pass_on_non_finite(kernels)
    return linear


@functools.cache  # one class for all layers: the compiler treats every class as another model
def _compute_cast_class(module: Any) -> Any:
    class ComputeCastBlockwiseLinear(module.Float8BlockwiseLinear):  # type: ignore[misc]  # torchao ships no types
        """`Float8BlockwiseLinear` that casts its input, and by default its weight, to bf16 first."""

        weight_cast_source: str = "compute"

        def forward(self, input: Tensor) -> Tensor:
            x = input.to(torch.bfloat16)
            weight = self.weight.to(torch.bfloat16) if self.weight_cast_source == "compute" else self.weight
            output: Tensor = module.fp8_blockwise_mm.apply(x, weight, self.block_size, torch.bfloat16, False)
            return output

    return ComputeCastBlockwiseLinear


def convert(linear: nn.Linear, precision: PrecisionSpec) -> nn.Linear:
    """Return the block-scaled linear that shares `linear`'s parameters.

    Raises `UsageError` for another recipe than blockwise, a bias, sizes that are no multiple of 128, or a
    machine without the kernels.
    """
    require_backend(precision)
    needs = "bias" in dict(linear.named_parameters())
    problems = ["no bias"] if needs else []
    problems += [f"in_features a multiple of {MULTIPLE}"] if linear.in_features % MULTIPLE else []
    problems += [f"out_features a multiple of {MULTIPLE}"] if linear.out_features % MULTIPLE else []
    if problems:
        raise UsageError(
            f"precision.backend: torchao_blockwise needs {' and '.join(problems)}, got {linear}; change the "
            "layer or keep it in BF16 (precision.exclude)"
        )
    converted: Any = _compute_cast_class(_import_linear()).from_float(linear)
    converted.weight_cast_source = precision.weight_cast_source
    result: nn.Linear = converted
    return result
