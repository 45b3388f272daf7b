"""Thresholds with a guarantee: Learn-then-Test over the losses of prompts that were set aside.

By Angelopoulos, Bates, Candes, Jordan and Lei (2021, https://arxiv.org/abs/2110.01052), for early
exit by CALM (Schuster et al. 2022, https://arxiv.org/abs/2207.07061): every candidate has the
hypothesis that its expected loss exceeds delta; candidates are tested from the most conservative
on, until one is not rejected. With probability 1 - epsilon over the prompts, no threshold is
chosen whose expected loss exceeds delta.

The unit is a prompt: tokens of a prompt depend on each other, prompts must not. They are drawn
independently from what the threshold will be used on. A loss is in [0, 1], say the share of a
prompt's tokens that differ from the whole model's. Candidates, delta, epsilon and the test are
fixed before losses are seen: whoever tries several and keeps the best has no guarantee.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

RiskTest = Literal["hoeffding-bentkus", "betting"]

_MOST = 1_000_000  # prompts, beyond which none are asked for
_ROUNDING = 1e-9  # of n * mean, which is a whole number where losses are 0 and 1


@dataclass(frozen=True)
class Guarantee:
    """What a chosen threshold holds: plain numbers, which JSON keeps.

    Attributes:
        threshold: The loosest that was certified.
        delta: The expected loss that it does not exceed, ...
        epsilon: ... but for this probability, over the prompts that were drawn.
        prompts: Prompts that it was certified on.
        mean_loss: Their mean loss at the threshold.
        p_value: Of the hypothesis that the expected loss at the threshold exceeds delta.
        test: What the p-value is by.
    """

    threshold: float
    delta: float
    epsilon: float
    prompts: int
    mean_loss: float
    p_value: float
    test: RiskTest


def choose_threshold(
    losses: Any,
    thresholds: Sequence[float],
    delta: float,
    epsilon: float,
    test: RiskTest = "hoeffding-bentkus",
) -> Guarantee | None:
    """The loosest threshold that is certified, each before it being certified, too.

    Args:
        losses: [n, K] in [0, 1], of n prompts at K thresholds.
        thresholds: K of confidence, from the most conservative to the loosest: falling. A fine
            grid costs nothing in epsilon.
        delta: The expected loss that is tolerated, in (0, 1).
        epsilon: The probability of exceeding it that is tolerated, in (0, 1).
        test: "hoeffding-bentkus" or "betting", which needs fewer prompts where losses vary little
            between them, and as many or more where most are 0 and some are near 1.

    Returns:
        None if not even the most conservative can be certified: `prompts_needed` may say why.

    Raises:
        TypeError: If something is not numbers.
        ValueError: If a loss, `delta` or `epsilon` is out of range, shapes do not fit, thresholds
            do not fall or `test` is unknown.
    """
    delta, epsilon = _check_share("delta", delta), _check_share("epsilon", epsilon)
    if not isinstance(test, str) or test not in get_args(RiskTest):
        known = " or ".join(f'"{name}"' for name in get_args(RiskTest))
        raise ValueError(f"test={test!r} must be {known}.")
    table = _check_losses(losses, "[n, K]: a row a prompt, a column a threshold")
    steps = _check_thresholds(thresholds, table)
    n, means = len(table), table.mean(axis=0)
    if test == "betting":
        # Prompts are often sorted by where they come from; a bet needs each to be like those
        # before it. This order is fixed, so that nobody can try others until one is lucky.
        table = table[np.random.default_rng(0).permutation(n)]
        p_values = [betting(column, delta, epsilon) for column in table.T]
    else:
        p_values = [hoeffding_bentkus(float(mean), n, delta) for mean in means]
    last = fixed_sequence(p_values, epsilon) - 1
    if last < 0:
        return None
    mean, p_value = float(means[last]), p_values[last]
    return Guarantee(float(steps[last]), delta, epsilon, n, mean, p_value, test)


def fixed_sequence(p_values: Sequence[float] | np.ndarray, epsilon: float) -> int:
    """How many hypotheses are rejected, in a fixed order: those before the first that is not.

    Each is tested at all of epsilon, and yet the probability of rejecting any true one is at most
    epsilon, however the p-values depend on each other: the first true one has to be rejected
    first.

    Args:
        p_values: [K] in [0, 1].
        epsilon: In (0, 1).

    Returns:
        0..K.

    Raises:
        TypeError: If something is not numbers.
        ValueError: If `epsilon` or a p-value is out of range or `p_values` is not [K].
    """
    epsilon = _check_share("epsilon", epsilon)
    values = _check_array("p_values", p_values, 1, "[K]: one a hypothesis")
    kept = np.flatnonzero(values > epsilon)
    return int(kept[0]) if len(kept) else len(values)


def hoeffding_bentkus(mean: float, n: int, delta: float) -> float:
    """The p-value of the hypothesis that the expected loss exceeds delta, by the mean alone.

    The lesser of exp(-n h1(min(mean, delta), delta)), Hoeffding's with h1(a, b) the divergence of
    Bernoulli(a) from Bernoulli(b), and e P(Binomial(n, delta) <= ceil(n mean)), Bentkus'. Losses
    may have any distribution in [0, 1].

    Args:
        mean: Mean loss of the prompts, in [0, 1]; of no prompts, anything.
        n: Prompts, independent of each other.
        delta: In (0, 1).

    Returns:
        In [0, 1]; 1 for no prompts.

    Raises:
        TypeError: If an argument is not a number, or `n` not an int.
        ValueError: If an argument is out of range.
    """
    delta = _check_share("delta", delta)
    if isinstance(n, bool) or not isinstance(n, Integral):
        raise TypeError(f"n={n!r} must be an int: the number of prompts.")
    if n < 0:
        raise ValueError(f"n={n} must be at least 0: the number of prompts.")
    if n == 0:
        return 1.0
    mean, n = _check_mean(mean), int(n)
    hoeffding = -n * _divergence(min(mean, delta), delta)
    bentkus = 1 + _log_binomial(_count(mean, n), n, delta)
    return math.exp(min(hoeffding, bentkus, 0.0))


def betting(losses: Any, delta: float, epsilon: float = 0.1) -> float:
    """The p-value of the hypothesis that the expected loss exceeds delta, by betting against it.

    By Waudby-Smith and Ramdas (2020, https://arxiv.org/abs/2010.09686), with the bets of Bates et
    al. (2021, https://arxiv.org/abs/2101.02703): each loss multiplies a capital of 1 by
    1 - bet * (loss - delta), the bet depending on those before. If the hypothesis holds, capital
    does not grow in expectation, so by Ville's inequality it reaches 1 / p with probability p at
    most. The smaller the variance that was seen, the larger the bet.

    Args:
        losses: [n] in [0, 1], in an order that does not depend on them, each with the same
            expectation whatever those before it were. Sorted by difficulty or by source, easy
            ones first, they make p-values that are too small: shuffle them once.
        delta: In (0, 1).
        epsilon: In (0, 1), the level that bets aim at. The p-value holds at every level.

    Returns:
        In [0, 1]; 1 for no prompts.

    Raises:
        TypeError: If something is not numbers.
        ValueError: If something is out of range or `losses` is not [n].
    """
    delta, epsilon = _check_share("delta", delta), _check_share("epsilon", epsilon)
    values = _check_array("losses", losses, 1, "[n]: one a prompt")
    n = len(values)
    if n == 0:
        return 1.0
    seen = np.arange(2, n + 2)  # with half a loss of 1 that stands for those not seen yet
    means = (0.5 + np.cumsum(values)) / seen
    variances = (0.25 + np.cumsum((values - means) ** 2)) / seen
    before = np.append(0.25, variances[:-1])  # a bet is placed before its loss is seen
    # At most 1: then a loss of 1 leaves delta of the capital, never nothing.
    bets = np.minimum(1.0, np.sqrt(2 * math.log(1 / epsilon) / (n * before)))
    log_capital = np.cumsum(np.log1p(-bets * (values - delta)))
    return math.exp(-max(0.0, float(log_capital.max())))


def prompts_needed(mean: float, delta: float, epsilon: float) -> int | None:
    """The least number of prompts on which a mean loss would be certified by Hoeffding-Bentkus.

    With a mean of 0, what has to be set aside at least, whatever the thresholds. The mean of other
    prompts will differ: to be certified more often than not, take more.

    Args:
        mean: In [0, 1].
        delta: In (0, 1).
        epsilon: In (0, 1).

    Returns:
        None if no number up to a million is enough; none is for a mean of `delta` or more.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.
    """
    mean = _check_mean(mean)
    delta, epsilon = _check_share("delta", delta), _check_share("epsilon", epsilon)
    divergence = _divergence(min(mean, delta), delta)
    if mean >= delta or divergence <= 0:
        return None
    by_hoeffding = -math.log(epsilon) / divergence
    # P(Binomial(n, delta) <= k) and its last term follow from those of n - 1. That it rises where k
    # does rules out bisection; rounding errors add up, so what they leave open is computed afresh.
    k, cdf, pmf = 0, 1.0, 1.0
    for n in range(1, _MOST + 1):
        cdf -= delta * pmf
        pmf *= n / (n - k) * (1 - delta)
        if _count(mean, n) > k:
            pmf *= (n - k) / (k + 1) * delta / (1 - delta)
            k, cdf = k + 1, cdf + pmf
        is_near = n > by_hoeffding - 1 or math.e * cdf <= 1.01 * epsilon + 1e-9
        if is_near and hoeffding_bentkus(mean, n, delta) <= epsilon:
            return n
    return None


def _divergence(a: float, b: float) -> float:
    """h1 of the paper: of Bernoulli(a) from Bernoulli(b), b in (0, 1)."""
    of_one = a * math.log(a / b) if a > 0 else 0.0
    of_zero = (1 - a) * (math.log1p(-a) - math.log1p(-b)) if a < 1 else 0.0
    return of_one + of_zero


def _count(mean: float, n: int) -> int:
    """ceil(n * mean), but for rounding.

    Bentkus' bound holds with the logarithm interpolated between whole numbers, so what is within
    rounding of one may take its value.
    """
    return max(0, math.ceil(n * mean - _ROUNDING))


def _log_binomial(k: int, n: int, p: float) -> float:
    """The logarithm of P(Binomial(n, p) <= k), 0 <= k <= n, summed from the k-th term down."""
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    last = choices + k * math.log(p) + (n - k) * math.log1p(-p)
    i = np.arange(k, 0, -1)
    ratios = np.log(i / (n - i + 1)) + math.log1p(-p) - math.log(p)  # of term i - 1 to term i
    terms = np.append(0.0, np.cumsum(ratios))
    top = float(terms.max())
    return min(0.0, last + top + math.log(float(np.exp(terms - top).sum())))


def _check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number.")
    return float(value)


def _check_share(name: str, value: Any) -> float:
    number = _check_number(name, value)
    if not 0 < number < 1:  # nor if it is NaN
        raise ValueError(f"{name}={value!r} must be between 0 and 1, neither included.")
    return number


def _check_mean(mean: Any) -> float:
    number = _check_number("mean", mean)
    if not 0 <= number <= 1:
        raise ValueError(f"mean={mean!r} must be in 0..1: scale losses to it.")
    return number


def _check_array(name: str, values: Any, dims: int, shape: str) -> np.ndarray:
    """As float64, with every value in [0, 1]."""
    array = _as_floats(name, values)
    if array.ndim != dims:
        raise ValueError(f"{name} is of shape {list(array.shape)}; it must be {shape}.")
    wrong = ~((array >= 0) & (array <= 1))  # NaN is in no range
    if wrong.any():
        at = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"{name}{at} is {float(array[tuple(at)])}; all must be in 0..1: scale them, and leave "
            "out what could not be measured."
        )
    return array


def _check_losses(losses: Any, shape: str) -> np.ndarray:
    table = _check_array("losses", losses, 2, shape)
    if not table.size:
        raise ValueError(
            f"losses is of shape {list(table.shape)}; it needs a prompt and a threshold at least."
        )
    return table


def _check_thresholds(thresholds: Any, table: np.ndarray) -> np.ndarray:
    steps = _as_floats("thresholds", thresholds)
    if steps.shape != table.shape[1:]:
        raise ValueError(
            f"thresholds is of shape {list(steps.shape)}; it must be [{table.shape[1]}]: one a "
            f"column of losses, which is of shape {list(table.shape)}."
        )
    if not np.isfinite(steps).all():
        raise ValueError(f"thresholds={steps.tolist()} must be finite.")
    if (np.diff(steps) >= 0).any():
        raise ValueError(
            f"thresholds={steps.tolist()} must fall, from the most conservative to the loosest: "
            "sort them, and the columns of losses with them."
        )
    return steps


def _as_floats(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different length
        raise ValueError(f"{name} must be an array of numbers: {error}.") from error
    if array.size and array.dtype.kind not in "biuf":
        raise TypeError(f"{name} is an array of {array.dtype}; it must be of numbers.")
    return array.astype(np.float64)
