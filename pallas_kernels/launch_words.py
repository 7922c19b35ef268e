"""The words that the host and the transfer kernel agree on: of a launch, its state, its report, and inboxes."""

from __future__ import annotations

CLAIMED, FINISHED, ERROR, REFUSED, LAUNCHES, REPORT, STATE = *range(6), 7
"""Words of a launch's state, and how many there are. REPORT and the word behind it are the report of the last launch,
LAUNCHES anything; the others are zero between launches."""
REPORT_SIZE = 2
VERSION, POISONED, ABORTED = range(3)
"""Words of an inbox before its flags. POISONED is set from *ready*, which lets others write, until *finish* has all of
it. ABORTED and the word behind it are an attempt that the host gives up: what waits in it ends."""
(
    N_TILES,
    DEADLINE_MS,
    SESSION,
    EPOCH,
    NEW_VERSION,  # what VERSION becomes at the end; -1: stays
    SEVERAL,  # whether other devices raise the same counters
    INBOX,  # index of the own one among the addresses
    COUNTERS,  # first counter of an inbox
    RESET,  # how many counters are zeroed before anything else, and whether POISONED is set
    N_HEADS,
    N_TAILS,
    N_TELLS,
    LISTS,  # heads and tells: pairs of buffer and word of that inbox; tails: words of the own one; see `launch_size`
) = range(13)
"""Words of a launch."""
HEAD, TAIL, COUNTER = 1, 2, 3
"""Kinds of error: what was waited for; the rest of the word says which one."""
LATE, GIVEN_UP = 4, 5
"""Kinds of error: an attempt of a later epoch has begun; the host has given this one up."""
ERROR_SHIFT = 28


def launch_size(flags: int, buffers: int) -> tuple[int, int, int, int]:
    """Where the parts of a launch lie.

    Args:
      flags: Room for so many heads, tails and tells each.
      buffers: Room for so many addresses.

    Returns:
      Words before the tails, the tells and the addresses, and of the whole.
    """
    tails, tells = LISTS + 2 * flags, LISTS + 3 * flags
    bases = tells + 2 * flags
    return tails, tells, bases, bases + 2 * buffers
