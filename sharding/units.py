"""Bytes and seconds in words."""

from __future__ import annotations

from typing import SupportsFloat


def bytes_text(nbytes: SupportsFloat, short: bool = False) -> str:
    """Three digits and a decimal unit, `298 MB`; short, `298M`."""
    value, unit = float(nbytes), ""
    for bigger in ("k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, bigger
    return f"{value:.3g}{unit}" if short else f"{value:.3g} {unit}B"


def secs_text(secs: float) -> str:
    """Three digits in s, ms or us."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if secs * factor >= 0.9995:
            return f"{secs * factor:.3g} {unit}"
    return f"{secs * 1e6:.3g} us"
