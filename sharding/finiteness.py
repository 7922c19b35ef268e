"""What is said of values to be quantized that are not finite: what they are made of, and what may have made them so."""

from __future__ import annotations

from shardfly_jax.sharding.errors import NotFinite
from shardfly_jax.sharding.families import Family
from shardfly_jax.sharding.language import Astype, Divided, Expr, Scale
from shardfly_jax.sharding.patterns import FAMILY, name_pattern
from shardfly_jax.sharding.walks import nodes, sources

SHOWN = 4
"""Names of sources in a message."""


def described(expr: Expr, i: int) -> str:
    """The sources of a bound expression at layer `i`, and whether it computes with them, for messages."""
    names = [repr(name_pattern(name).format({FAMILY: i})) for name in sources(expr)]
    of = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    computes = any(isinstance(node, Scale | Divided | Astype) for node in nodes(expr))
    return (of or "a fill") + (", which the mapping's scale or cast may have made so," if computes else "")


def not_finite(family: Family, tensor: int) -> NotFinite:
    """The error of a target whose values are not finite.

    Args:
      family: Of the target.
      tensor: Which of the family's tensors it is.
    """
    assert family.expr is not None
    return NotFinite(
        f"target {family.name(tensor)!r}: quantize: the values of {described(family.expr, family.first + tensor)} hold "
        "NaN or infinity, but a scale needs finite values. Look at the trainer's weights."
    )
