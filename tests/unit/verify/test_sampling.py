import math

import numpy as np
import pytest

from outpace.verify import gumbel_argmax, gumbel_noise
from outpace.verify.oracle import oracle_noise
from verify_support import chi_square

EULER = 0.5772156649015329
NUM = 200_000
PINNED = [-1.5753393218783878, -0.863865850409436, 1.0906208298656086]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**64 + 5])
@pytest.mark.parametrize("position", [0, 1, 100_000])
def test_noise_is_what_the_docstring_says(seed, position):
    tokens = np.array([0, 1, 31_999, 2**31 - 1])
    expected = [oracle_noise(seed, position, int(token)) for token in tokens]
    np.testing.assert_allclose(gumbel_noise(seed, position, tokens), expected, rtol=1e-13)


def test_noise_does_not_change_between_versions():
    """A seed that gave a text yesterday must give it tomorrow: computed once from the formula, kept for ever."""
    np.testing.assert_allclose(gumbel_noise(42, 7, np.arange(3)), PINNED, rtol=1e-13)


@pytest.mark.parametrize("which", ["tokens", "positions", "seeds"])
def test_noise_is_standard_gumbel_along(which):
    noise = noise_along(which)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - EULER) < 4 * math.pi / math.sqrt(6 * len(noise))
    # Var of the sample variance of a Gumbel variable: (kurtosis 5.4 - 1) * variance ** 2 / n.
    variance = math.pi**2 / 6
    assert abs(noise.var() - variance) < 4 * variance * math.sqrt(4.4 / len(noise))
    counts = np.bincount((np.exp(-np.exp(-noise)) * 100).astype(int), minlength=100)
    assert chi_square(counts, np.full(100, 0.01)) < 148.23  # df 99, 0.999 quantile


@pytest.mark.parametrize("which", ["tokens", "positions", "seeds"])
def test_neighbours_are_independent_along(which):
    uniform = np.exp(-np.exp(-noise_along(which)))
    bound = 4 / math.sqrt(len(uniform))
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]) < bound
    # Also in the small: a 5 x 5 table of neighbours (df 24, 0.999 quantile 51.18).
    cells = (uniform[0::2] * 5).astype(int) * 5 + (uniform[1::2] * 5).astype(int)
    assert chi_square(np.bincount(cells, minlength=25), np.full(25, 0.04)) < 51.18


def test_seed_and_position_do_not_stand_in_for_each_other():
    tokens = np.arange(50)
    rows = {tuple(gumbel_noise(seed, position, tokens)) for seed in range(20) for position in range(20)}
    assert len(rows) == 400


def noise_along(which):
    if which == "tokens":
        return gumbel_noise(3, 17, np.arange(NUM))
    keys = range(NUM // 20)
    if which == "positions":
        return np.concatenate([gumbel_noise(3, key, np.array([11])) for key in keys])
    return np.concatenate([gumbel_noise(key, 17, np.array([11])) for key in keys])


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 10.0, 50.0])
def test_the_fused_arg_max_is_the_arg_max_of_logits_plus_noise(spread):
    rng = np.random.default_rng(int(spread * 10))
    for seed in range(60):
        logits = rng.normal(0, spread, 700).astype(np.float32)
        logits[rng.random(700) < 0.3] = -math.inf
        expected = int(np.argmax(logits.astype(np.float64) + gumbel_noise(seed, 5, np.arange(700))))
        assert gumbel_argmax(logits, seed, 5) == expected


def test_tokens_at_minus_infinity_are_never_drawn():
    logits = np.full(100, -math.inf, np.float32)
    logits[[3, 60]] = [-1e30, -1e30]
    drawn = {gumbel_argmax(logits, seed, 0) for seed in range(50)}
    assert drawn == {3}  # noise is lost beside 1e30: the scores are equal, the lowest id wins
    assert gumbel_argmax(np.full(4, -math.inf, np.float32), 0, 0) == -1


def test_a_certain_token_is_drawn_whatever_the_noise():
    logits = np.zeros(50, np.float32)
    logits[31] = 60
    assert {gumbel_argmax(logits, seed, seed * 3) for seed in range(500)} == {31}
