import numpy as np
import pytest

from fp8parity_analysis import secondary


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500, 100_000])
def test_a_long_grid_is_thinned_evenly_and_keeps_its_end(count):
    columns = np.arange(count) + 7
    kept = secondary._evenly(columns)
    assert len(kept) == min(count, len(kept)) <= 1000
    assert len(kept) > 500 or len(kept) == count
    assert len(np.unique(np.diff(kept))) <= 1
    if count:
        assert kept[-1] == columns[-1]


def test_secondary_p_values_are_one_family():
    adjusted = secondary.secondary_p_values(trajectory=0.01, slope=0.04, spikes=None)
    assert adjusted == {"trajectory": 0.02, "slope": 0.04, "spikes": None}
