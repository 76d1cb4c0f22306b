"""How the numbers of ``cpu_fallback/elementary.py`` were found, and how far its functions are from float64.

    python tools/fit_elementary.py

exp(r) on |r| <= log(2)/2 is 1 + r + r^2*q(r), q of degree 4: 1 and r are exact in float32, so only q is fitted. The
relative error of exp is minimised in the largest value by Lawson's method: least squares, the weights raised again and
again where the error is large. Then each coefficient is rounded to float32.

erf(x) is x + x*q(x^2) for |x| <= 1, q of degree 6, and 1 - exp(-p(|x|)) above, p of degree 7 on [1, 4], found in
the same way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cpu_fallback import elementary

F64 = NDArray[np.float64]
DEGREE = 4
ERF_NEAR_DEGREE, ERF_FAR_DEGREE = 6, 7
POINTS = 4001
MARGIN = 1.0005  # the reduced argument passes log(2)/2 by its rounding


def chebyshev(low: float, high: float) -> F64:
    """POINTS of [low, high], denser towards its ends."""
    return (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(POINTS) + 0.5) / POINTS)


def fit(x: F64, target: F64, to_relative: F64, degree: int, rounds: int = 3000) -> tuple[F64, float]:
    """The polynomial nearest to ``target`` at ``x``, its error times ``to_relative`` counted, and the largest of it."""
    powers = x[:, None] ** np.arange(degree + 1)
    weights = np.ones(len(x))
    for _ in range(rounds):
        root = to_relative * np.sqrt(weights)
        coefficients = np.asarray(np.linalg.lstsq(powers * root[:, None], target * root, rcond=None)[0], np.float64)
        error = np.abs((powers @ coefficients - target) * to_relative)
        weights *= error / error.max() + 1e-3
        weights /= weights.mean()
    return coefficients, float(error.max())


def fit_exp() -> tuple[F64, float]:
    """The coefficients of q from r^0 to r^4 in float64, and the largest relative error of exp that they leave."""
    edge = np.log(2) / 2 * MARGIN
    r = chebyshev(-edge, edge)
    return fit(r, (np.expm1(r) - r) / r**2, r**2 / np.exp(r), DEGREE)


def exact_erf(x: NDArray[np.floating]) -> F64:
    return np.array([math.erf(value) for value in x.tolist()])


def fit_erf_near() -> tuple[F64, float]:
    """The coefficients of q from x^0 to x^12, and the largest relative error of erf on [0, 1]."""
    x = chebyshev(0.0, 1.0)
    ratio = exact_erf(x) / x
    return fit(x**2, ratio - 1, 1 / ratio, ERF_NEAR_DEGREE)


def fit_erf_far() -> tuple[F64, float]:
    """The coefficients of p from x^0 to x^7, and the largest relative error of erf on [1, 4]."""
    x = chebyshev(1.0, 4.0)
    rest = np.array([math.erfc(value) for value in x.tolist()])
    return fit(x, -np.log(rest), rest / (1 - rest), ERF_FAR_DEGREE)


def ulps(got: NDArray[np.float32], exact: F64) -> float:
    """The largest distance in units of the last place of the exact value's float32."""
    return float((np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def floats(low: int, high: int, step: int = 1) -> NDArray[np.float32]:
    return np.arange(low, high, step, dtype=np.int64).astype(np.int32).view(np.float32)


def measure() -> dict[str, float]:
    """The largest errors in ulp: exp on some 20 million arguments in [-64, 88], the others on every fraction.

    The fraction (and for rsqrt the exponent's parity) decides a reciprocal's bits: the rest only shifts the exponent.
    """
    parts = [np.linspace(-64, 88, 8_000_003).astype(np.float32), floats(0x3F800000, 0x42B00000, 5)]
    parts += [
        -floats(0x3F800000, 0x42800000, 5),
        floats(0x33000000, 0x3F800000, 37),
        -floats(0x33000000, 0x3F800000, 37),
    ]
    fractions = floats(0x3F800000, 0x40800000)
    near = np.concatenate([floats(0x00800000, 0x40800000, 1009), np.linspace(0, 4, 500_003)[1:].astype(np.float32)])
    inverse_root: Callable[[F64], F64] = lambda x: 1 / np.sqrt(x)  # noqa: E731
    return {
        "exp": max(ulps(elementary.exp(x), np.exp(x.astype(np.float64))) for x in parts),
        "reciprocal": ulps(elementary.reciprocal(fractions), 1 / fractions.astype(np.float64)),
        "rsqrt": ulps(elementary.rsqrt(fractions), inverse_root(fractions.astype(np.float64))),
        "erf": ulps(elementary.erf(near), exact_erf(near)),
    }


def main() -> None:
    coefficients, error = fit_exp()
    print(f"relative error of the fit before rounding: {error:.3g} ({error * 2**24:.3f} of 2^-24)")
    for power, c in enumerate(coefficients.astype(np.float32), start=2):
        print(f"EXP_E{power} = {float(c)!r}")
    for name, fitted in (("ERF_NEAR", fit_erf_near()), ("ERF_FAR", fit_erf_far())):
        print(f"{name} = {[float(c) for c in fitted[0].astype(np.float32)]}, left: {fitted[1] * 2**24:.3f} of 2^-24")
    for name, worst in measure().items():
        print(f"{name}: at most {worst:.3f} ulp")


if __name__ == "__main__":
    main()
