"""torchao's `Float8Linear` (torchao.float8, 0.18): FP8 GEMMs through `torch._scaled_mm`, on CUDA and on CPU.

What torchao's own module lacks and `ComputeCastFloat8Linear` adds: it honours the autocast of the input's
own device (torchao reads the CUDA autocast state only, so on a CPU the arms would compute in different
dtypes), and it lets the weight cast read the bf16 copy instead of the fp32 master.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from fp8parity.errors import UsageError
from fp8parity.precision.reference import compute_dtype_of
from fp8parity.precision_rules import BACKEND_RECIPES, require_backend
from fp8parity.version_gates import AMD_REFUSED

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fp8parity.spec import PrecisionSpec

with warnings.catch_warnings():
    # torch 2.13 announces the removal of a pytree name that torchao 0.18 uses; the user cannot act on it
    warnings.simplefilter("ignore")
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

RECIPES = BACKEND_RECIPES["torchao_float8"]


class ComputeCastFloat8Linear(Float8Linear):  # type: ignore[misc]  # torchao ships no types
    """`Float8Linear` whose input, and by default its weight, is cast to the compute dtype first.

    `weight_cast_source`: `compute` quantises the bf16 copy of the weight, `master` the stored parameter
    itself.
    """

    weight_cast_source: str = "compute"

    def forward(self, input: Tensor) -> Tensor:
        """Map input [..., in_features] to [..., out_features] in the compute dtype."""
        dtype = compute_dtype_of(input)
        weight = self.weight.to(dtype) if self.weight_cast_source == "compute" else self.weight
        output: Tensor = matmul_with_hp_or_float8_args.apply(
            input.to(dtype), weight.t(), self.linear_mm_config, self.config
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


def convert(linear: nn.Linear, precision: PrecisionSpec) -> nn.Linear:
    """Return the FP8 linear that shares `linear`'s parameters; `UsageError` for a recipe torchao lacks, and on AMD."""
    require_backend(precision)
    if linear.weight.is_cuda and torch.version.hip is not None:
        raise UsageError(AMD_REFUSED.format(backend=precision.backend))
    config = Float8LinearConfig.from_recipe_name(precision.recipe)
    converted: ComputeCastFloat8Linear = ComputeCastFloat8Linear.from_float(linear, config=config)
    converted.weight_cast_source = precision.weight_cast_source
    return converted


def patch_code_generation() -> None:
    """Give the control the same compiler as the FP8 arm.

    Converting a model makes torchao patch Inductor's min/max code for the whole process; applying the patch
    everywhere keeps the precision the only difference between the arms.
    """
    from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen

    _patch_inductor_min_max_codegen()
