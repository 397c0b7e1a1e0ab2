"""e4m3 byte by byte, in Python's floats: sign, four bits of exponent with bias 7, three of mantissa; 0x7F is NaN.

Written from the format's definition (OCP 8-bit floating point, E4M3); knows neither torch's conversion nor Triton's.
"""

from __future__ import annotations

import math
import struct

NOT_A_NUMBER = 0x7F
LARGEST = 448.0


def decode(code: int) -> float:
    """The value of a byte."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == NOT_A_NUMBER:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


POSITIVE = [decode(code) for code in range(NOT_A_NUMBER)]  # ascending


def encode(value: float) -> int:
    """The byte of the nearest value, of two equally near ones the even byte; beyond the largest one the largest."""
    if math.isnan(value):
        return NOT_A_NUMBER
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    size = min(abs(value), LARGEST)
    return sign | min(range(NOT_A_NUMBER), key=lambda code: (abs(POSITIVE[code] - size), code & 1))


def single(value: float) -> float:
    """Rounded to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def quantise(vector: list[float]) -> tuple[list[int], float]:
    """The bytes of a vector of float32 values and its scale: the largest magnitude, at least 1e-4, over 448."""
    largest = max(math.nan if math.isnan(value) else abs(value) for value in vector)
    if any(math.isnan(value) for value in vector):
        return [NOT_A_NUMBER] * len(vector), math.nan
    scale = single(max(largest, single(1e-4)) / LARGEST)
    return [encode(single(value / scale)) for value in vector], scale
