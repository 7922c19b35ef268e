"""Messages between processes: a JSON header under a keyed hash, then raw frames. Nothing is ever unpickled.

frame 0: BLAKE2b of frame 1, 16 bytes, keyed with the token
frame 1: the header, a JSON object whose `op` names it
frame 2: payload, of chunks only
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

log = logging.getLogger("shardfly_jax.worlds")

Header = dict[str, Any]

PROTOCOL = 5
"""Both sides of a world must speak the same."""
MAC_NBYTES = 16
MAX_SECS = 600_000
"""Of any wait: pyzmq and kernels count milliseconds in 31 bits, and some waits are three of these together."""
MAX_HEADER_NBYTES = 16 << 20
"""Longer messages are not even received on control sockets."""


class Refused(Exception):
    """A message that is not acted upon; says why.

    Attributes:
      is_foreign: It was sealed with another token.
    """

    def __init__(self, why: str, *, is_foreign: bool = False):
        super().__init__(why)
        self.is_foreign = is_foreign


class Complaints:
    """Logs messages that were refused, at most one line a second: a stranger may send many.

    Args:
      what: They are, for the lines.
    """

    def __init__(self, what: str):
        self._what = what
        self._why, self._count, self._next = "", 0, 0.0

    def add(self, refused: Refused) -> None:
        """Notes one."""
        self._why, self._count = str(refused), self._count + 1
        self.flush()

    def flush(self) -> None:
        """Logs what has been noted, if the last line is a second old."""
        if self._count and (now := time.monotonic()) >= self._next:
            log.warning("refused %d x %s, the last: %s", self._count, self._what, self._why)
            self._count, self._next = 0, now + 1.0


def is_number(x: Any) -> bool:
    """Whether a field holds a number that is not negative and has at most 63 bits."""
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 1 << 63


def is_text(x: Any) -> bool:
    """Whether a field holds text."""
    return isinstance(x, str)


def _is_text_or_none(x: Any) -> bool:
    return x is None or isinstance(x, str)


def is_secs(x: Any) -> bool:
    """Whether a field holds a positive number of seconds, at most `MAX_SECS`."""
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= MAX_SECS


def _is_ranks(x: Any) -> bool:
    return isinstance(x, list) and all(map(is_number, x))


def _is_by_name(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, dict) and all(of(value) for value in x.values())


_REGISTRATION = {"digest": is_text, "source_ranks": is_number, "target_ranks": is_number,
                 "held": lambda x: _is_ranks(x) and len(x) > 0, "replicas": _is_by_name(_is_ranks),
                 "endpoint": is_text, "versions": _is_by_name(is_number), "newest": is_number,
                 "confirms": lambda x: isinstance(x, bool)}  # fmt: skip
_ATTEMPT = {"session": is_number, "epoch": is_number}

Messages = Mapping[str, Mapping[str, Callable[[Any], bool]]]
"""Fields of each message, and their checks."""


def _numbered(messages: Messages) -> Messages:
    return {op: {"seq": is_number, **fields} for op, fields in messages.items()}


TO_RENDEZVOUS = _numbered({
    "hello": {"protocol": is_number, "name": is_text},
    "beat": {"session": is_number},
    "register": {"session": is_number, **_REGISTRATION},
    "enter": {"session": is_number, "entry": is_number, "wait_secs": is_secs, "refusal": _is_text_or_none},
    "withdraw": {"session": is_number, "entry": is_number, "why": is_text},
    "ready": _ATTEMPT,
    "arrived": _ATTEMPT,
    "fail": {**_ATTEMPT, "kind": is_text, "phase": is_text, "rank": is_number, "why": is_text},
    "leave": {"session": is_number},
})  # fmt: skip
"""What a process may say."""

FROM_RENDEZVOUS = _numbered({
    "welcome": {"session": is_number, "deadline_secs": is_secs, "lost_secs": is_secs},
    "beat": {"session": is_number},
    "registered": {"session": is_number},
    "news": {"session": is_number, "digest": is_text, "newest": is_number, "versions": _is_by_name(is_number)},
    "refused": {"session": is_number, "why": is_text},
    "expelled": {"session": is_number, "why": is_text},
    "begin": {**_ATTEMPT, "entry": is_number, "number": is_number, "endpoints": _is_by_name(is_text)},
    "go": _ATTEMPT,
    "complete": {**_ATTEMPT, "number": is_number, "replicas": lambda x: isinstance(x, list) and all(map(is_text, x))},
    "done": _ATTEMPT,
    "failed": {**_ATTEMPT, "entry": is_number, "kind": is_text, "phase": is_text, "rank": is_number,
               "why": is_text},
})  # fmt: skip
"""What the rendezvous may say."""

CHUNKS: Messages = {"chunk": {**_ATTEMPT, "source": is_number, "target": is_number, "number": is_number}}
"""What senders may say: `number` counts the chunks from `source` to `target`, two ranks, in the plan's order."""


class Seal:
    """Seals and opens messages with a token.

    Args:
      token: A shared secret; never sent.
    """

    def __init__(self, token: str):
        self._key = hashlib.blake2b(token.encode()).digest()

    def _mac(self, header: bytes) -> bytes:
        return hashlib.blake2b(header, key=self._key, digest_size=MAC_NBYTES).digest()

    def close(self, header: Header, payload: Any = None) -> list[Any]:
        """The frames of a message."""
        text = json.dumps(header, separators=(",", ":")).encode()
        return [self._mac(text), text] if payload is None else [self._mac(text), text, payload]

    def open(self, frames: Sequence[Any], allowed: Messages) -> Header:
        """The header of a message, checked.

        Args:
          frames: As they were received, bytes or buffers.
          allowed: What may be said here.

        Raises:
          Refused: It was sealed with another token, or is none of `allowed`.
        """
        if len(frames) < 2:
            raise Refused(f"a message of {len(frames)} frames")
        mac, text = bytes(frames[0]), bytes(frames[1])
        if not hmac.compare_digest(mac, self._mac(text)):
            raise Refused("another token", is_foreign=True)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refused("a header that is not JSON") from error
        op = header.get("op") if isinstance(header, dict) else None
        fields = allowed.get(op) if isinstance(op, str) else None
        if fields is None:
            raise Refused(f"the message {str(op)[:40]!r}")
        wrong = [name for name, check in fields.items() if name not in header or not check(header[name])]
        if wrong:
            raise Refused(f"a message {op!r} with missing or wrong {wrong}")
        return dict(header)
