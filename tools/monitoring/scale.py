# SPDX-License-Identifier: Apache-2.0
"""Axes: where a value lies, and which numbers to write beside it."""
import math


class Scale:
    """Maps least..most to 0..1, linearly or by logarithm."""

    def __init__(self, values, log=False):
        good = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        self.log = log and bool(good) and min(good) > 0
        low, high = (min(good), max(good)) if good else (0.0, 1.0)
        if low == high:
            pad = abs(low) * 0.1 or 1.0
            low, high = (low / 1.1, low * 1.1) if self.log else \
                (low - pad, low + pad)
        self.low, self.high = low, high

    def widened(self, part=0.04):
        """With a margin, so that a line does not lie on the frame."""
        if self.log:
            f = (self.high / self.low) ** part
            self.low, self.high = self.low / f, self.high * f
        else:
            pad = (self.high - self.low) * part
            self.low, self.high = self.low - pad, self.high + pad
        return self

    def at(self, v):
        if self.log:
            if v <= 0:
                return 0.0
            return math.log(v / self.low) / math.log(self.high / self.low)
        return (v - self.low) / (self.high - self.low)

    def ticks(self, n):
        """Round numbers in the range, about n of them."""
        return (log_ticks if self.log else linear_ticks)(self.low, self.high, n)


def linear_ticks(low, high, n):
    raw = (high - low) / max(1, n)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9),
                                    math.floor(high / step + 1e-9) + 1)]


def log_ticks(low, high, n):
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9)):
        out = [m * 10.0 ** d for d in decades for m in multiples
               if low <= m * 10.0 ** d <= high]
        if len(out) >= min(n, 2):
            every = max(1, round(len(out) / max(1, n)))
            return out[::every]
    return linear_ticks(low, high, n)


def text(v):
    """Short and exact enough to tell ticks apart."""
    if not math.isfinite(v):
        return str(v)
    a = abs(v)
    if a == 0:
        return "0"
    if a >= 1e6 or a < 1e-3:
        mantissa, exponent = f"{v:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{v:.0f}" if a >= 1e4 else f"{v:.5g}" if a >= 100 else f"{v:.4g}"


def wide(values):
    """Whether a logarithm shows more."""
    good = [v for v in values if math.isfinite(v)]
    return bool(good) and min(good) > 0 and max(good) > 30 * min(good)
