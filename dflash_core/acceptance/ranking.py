"""Which of many drafters cannot be told from the best: a set instead of one winner by luck.

Multiple comparisons with the best (Hsu, Annals of Statistics 12, 1984, 1136-1144; Horrace and Schmidt,
Journal of Applied Econometrics 15, 2000, 1-26): a drafter stays in the set unless some other leads it by
more than the largest lead that chance gives in 95 % of the cases when nothing differs. Whichever drafter
is truly the best stays with that chance, since then every lead over it is chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from dflash_core.acceptance.resampling import TIE_TOLERANCE, Contrast, FloatArray, influences

DEFAULT_NUM_DRAWS = 4000
DEFAULT_SEED = 20260206


def told_from_best(
    emitted_per_drafter: ArrayLike,
    steps_per_drafter: ArrayLike,
    *,
    num_draws: int = DEFAULT_NUM_DRAWS,
    seed: int = DEFAULT_SEED,
    level: float = 0.95,
    places: Sequence[int] | None = None,
) -> Sequence[bool]:
    """Return for each of M drafters whether another is better than it by more than chance.

    Leads are differences of pooled taus over their standard errors, paired over prompts. What chance gives
    is drawn with a random weight per prompt, the same for all drafters (a multiplier bootstrap of the
    linearised taus, with the wider tails of Student's t for N prompts), so that drafters which resemble each
    other are not counted as many independent trials.

    Args:
        emitted_per_drafter: tokens emitted, [M, N]; column n of both is the same prompt (or conversation).
        steps_per_drafter: verification steps, [M, N], none of them 0.
        num_draws: how often chance is drawn.
        seed: of the random generator.
        level: chance with which the best drafter is among those that are not told from it.
        places: the drafters that are asked about, compared with all M; None asks about all.

    Returns:
        M booleans, or one for each of `places`; all False with fewer than 2 prompts, which tell nothing.
    """
    emitted_MN = np.asarray(emitted_per_drafter, dtype=np.float64)
    steps_MN = np.asarray(steps_per_drafter, dtype=np.float64)
    num_drafters, num_prompts = emitted_MN.shape
    places = range(num_drafters) if places is None else places
    if num_drafters < 2 or num_prompts < 2:
        return [False] * len(places)
    tau_M = emitted_MN.sum(axis=1) / steps_MN.sum(axis=1)
    influence_MN = np.stack([_influence(e, s) for e, s in zip(emitted_MN, steps_MN, strict=True)])
    influence_MN *= np.sqrt(num_prompts / (num_prompts - 1))
    # Drafter by drafter in memory: each is compared with rows of it.
    chance_MR = np.ascontiguousarray(_chance(influence_MN, num_draws, seed).T)
    return [_is_led(place, tau_M, influence_MN, chance_MR, level) for place in places]


def _influence(emitted_N: FloatArray, steps_N: FloatArray) -> FloatArray:
    nothing_N = np.zeros_like(steps_N)
    return influences(np.stack([nothing_N, nothing_N, emitted_N, steps_N], axis=1), Contrast.TAU)


def _chance(influence_MN: FloatArray, num_draws: int, seed: int) -> FloatArray:
    """Return draws of all taus' errors together: multivariate t with the covariance of the prompts, [R, M]."""
    num_prompts = influence_MN.shape[1]
    generator = np.random.default_rng([seed, 2])
    weights_RN = generator.standard_normal((num_draws, num_prompts))
    tails_R = np.sqrt(generator.chisquare(num_prompts - 1, size=num_draws) / (num_prompts - 1))
    chance_RM: FloatArray = (weights_RN @ influence_MN.T) / tails_R[:, None]
    return chance_RM


def _is_led(place: int, tau_M: FloatArray, influence_MN: FloatArray, chance_MR: FloatArray, level: float) -> bool:
    """Tell whether the largest lead over one drafter is more than chance gives."""
    others = np.arange(len(tau_M)) != place
    error_M = np.sqrt(((influence_MN[others] - influence_MN[place]) ** 2).sum(axis=1))
    lead_M = tau_M[others] - tau_M[place]
    is_flat_M = error_M < TIE_TOLERANCE
    if bool((is_flat_M & (lead_M > TIE_TOLERANCE)).any()):
        return True
    if bool(is_flat_M.all()):
        return False
    error_M, lead_M = error_M[~is_flat_M], lead_M[~is_flat_M]
    chance_MR = chance_MR[np.flatnonzero(others)[~is_flat_M]] - chance_MR[place]
    chance_MR /= error_M[:, None]
    chance_R = chance_MR.max(axis=0)
    return bool((lead_M / error_M).max() > np.quantile(chance_R, level))
