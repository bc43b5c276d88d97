"""Sums over resamples: the products of many sizes that they are made of, against the plain one."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_core.acceptance import resampling


@pytest.mark.parametrize("num_columns", [1, 2, 14])
@pytest.mark.parametrize(
    ("num_units", "num_resamples"),
    [(1, 100), (6, 1000), (24, 4000), (350, 4000), (350, 101), (499, 4000), (501, 4000), (7000, 300)],
)
def test_they_are_the_plain_product_of_the_draws(num_units: int, num_resamples: int, num_columns: int) -> None:
    counts_NC = np.random.default_rng(num_units).normal(size=(num_units, num_columns))
    found_RC = resampling.resampled_sums(counts_NC, num_resamples, seed=7)
    generator = np.random.default_rng(7)
    chosen_RN = np.concatenate(
        [
            generator.integers(num_units, size=(len(rows), num_units))
            for rows in np.array_split(np.arange(num_resamples), [resampling.CHUNK_CELLS // num_units])
        ]
    )
    plain_RC = np.stack([counts_NC[chosen_N].sum(axis=0) for chosen_N in chosen_RN[:50]])
    assert found_RC.shape == (num_resamples, num_columns)
    np.testing.assert_allclose(found_RC[:50], plain_RC, rtol=0, atol=1e-12 * num_units)
    plain_RC = np.stack([counts_NC[chosen_N].sum(axis=0) for chosen_N in chosen_RN[-3:]])
    np.testing.assert_allclose(found_RC[-3:], plain_RC, rtol=0, atol=1e-12 * num_units)


def test_without_columns_there_is_nothing_to_add_up() -> None:
    assert resampling.resampled_sums(np.zeros((5, 0)), 100, seed=1).shape == (100, 0)
