"""Every error that shardfly_jax raises. One base class, one type per thing that went wrong.

Messages read `{what}: {name!r} {field} is {value}, but {rule}. {what to do}.`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


class ShardflyError(Exception):
    """Base class of all errors raised by this library."""


class LanguageError(ShardflyError, ValueError):
    """An expression of the mapping language that cannot mean anything, whatever the tensors are."""


SHOWN_FAULTS = 20
"""Up to so many faults are shown each; of more, one of those that differ only in numbers."""
SHOWN_KINDS = 20


class PlanError(ShardflyError, ValueError):
    """A plan that cannot be made; finds every fault, not just the first, and shows one of each kind.

    Attributes:
      faults: One message per fault, in the order of target names.
    """

    def __init__(self, faults: str | Iterable[str]):
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__(self.faults[0] if len(self.faults) == 1 else "\n".join(_shown(self.faults)))


def _shown(faults: Sequence[str]) -> list[str]:
    """Lines about several faults."""
    kinds: dict[str, list[str]] = {}
    for fault in faults:
        kinds.setdefault(re.sub("[0-9]+", "#", fault) if len(faults) > SHOWN_FAULTS else fault, []).append(fault)
    lines = [f"{len(faults)} faults:"]
    for first, *others in list(kinds.values())[:SHOWN_KINDS]:
        lines.append(f"  - {first}" + (f" ({len(others)} more like it)" if others else ""))
    if (left := len(kinds) - SHOWN_KINDS) > 0:
        lines.append(f"  and {left} more kind{'s' if left > 1 else ''}; `faults` of this error has all")
    return lines


class PlanFileError(ShardflyError, ValueError):
    """A saved plan that cannot be read: not a plan, another file format, or bytes that do not match its digest."""


class DigestMismatch(ShardflyError, ValueError):
    """Two sides hold different plans; nothing was moved."""


class NotRegistered(ShardflyError, ValueError):
    """A plan without rollout buffers was used where buffers are needed."""


class RegistrationError(ShardflyError, ValueError):
    """Buffers that do not fit the plan; lists every fault. Nothing was registered."""


class ParamsMismatch(ShardflyError, ValueError):
    """Params whose names, shapes, dtypes or shardings are not the planned ones. Nothing was written."""


class StaleBuffer(ShardflyError, RuntimeError):
    """A registered buffer is no longer where it was registered. Nothing was written."""


class NoUpdate(ShardflyError, RuntimeError):
    """What belongs to an update was asked for while none is under way."""


class Poisoned(ShardflyError, RuntimeError):
    """A replica holds a mixture of two updates because one failed half way; the next complete update heals it."""


class TransferError(ShardflyError, RuntimeError):
    """An update did not finish. Replicas are poisoned unless the message says that nothing was written."""


class SyncTimeout(TransferError):
    """A rank waited for another one beyond the deadline; names both and the phase."""


class RankLost(TransferError):
    """A process that holds a rank died, left or stopped answering while others waited for it; names the rank."""


class UpdateRefused(TransferError):
    """An update that may not begin: another process voted against it, or an earlier one is pending; says which.

    Nothing was written, unless the message says that replicas are poisoned.
    """


class UnknownOutcome(TransferError):
    """A process that took part in a failed attempt may still write into this one's buffers; nothing else was."""


class StillPending(ShardflyError, TimeoutError):
    """An update that goes on in the background has no outcome yet; nothing is wrong."""


class WorldError(ShardflyError, RuntimeError):
    """A process cannot join a world, or take part in it as it wants to."""


class WorldLost(WorldError):
    """A world is gone for this process: its rendezvous does not answer, or has expelled it. Connect anew."""


class NotFinite(ShardflyError, ValueError):
    """A tensor to be quantized holds NaN or infinity; the replicas are poisoned if an update had begun."""


class VerificationError(ShardflyError, AssertionError):
    """Target bytes differ from what the mapping says they should be."""
