from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from fp8parity.errors import UsageError
from fp8parity.heldout import held_out_loss
from fp8parity.own_model import adapt, plain_twin
from fp8parity.own_trace import leaving_no_trace

from . import own_models as m
from . import trace_models as t


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (m.Dropped, "Dropped: its forward pass draws random numbers"),
        (m.Counting, "changes the buffers seen"),
        (t.Counted, r"changes the attributes layers\.1\.calls"),
        (t.Remembering, "changes the attributes cache"),
        (t.OwnGenerator, "changes the attributes generator"),
        (t.LayerDrop, "draws random numbers from Python's random"),
        (t.Noisy, r"draws random numbers from numpy\.random"),
    ],
)
def test_a_forward_pass_that_leaves_a_trace_is_refused(build: Any, reason: str) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = adapt(build())
    with pytest.raises(UsageError, match=reason), leaving_no_trace(model):
        model(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("build", [m.Buffered, t.Tagged, m.Wrapped])
def test_one_that_leaves_none_is_not(build: Any) -> None:
    model = adapt(build())
    with leaving_no_trace(model):
        model(torch.zeros(1, 4, dtype=torch.int64))


def test_what_is_refused_would_make_the_twin_another_model() -> None:
    """A count in Python is copied with the twin, and stands still there."""
    rows = torch.zeros(2, 5, dtype=torch.int64)
    model = adapt(t.Counted())
    twin = plain_twin(model)
    for _ in range(3):
        model(rows[:, :-1])
    assert held_out_loss(model, rows, 2, torch.no_grad) != held_out_loss(twin, rows, 2, torch.no_grad)
