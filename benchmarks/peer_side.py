"""What one side of another system's way holds, with PyTorch: tensors, buckets, and a line to the other side.

Values are drawn on the GPU from seeds that both sides know, so the receiver can tell what it must hold: it draws each
source again, permutes it by itself, and compares bits.
"""

from __future__ import annotations

import datetime
import functools
import multiprocessing.connection
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.buckets import Job, Part, Piece, fill

TIMEOUT = datetime.timedelta(seconds=100)
POISON = 0x5A


class Side:
    """What one process holds.

    Args:
      job: What is to be moved.
      sends: Whether this is the trainer.
      gpu: Its GPU.
      other: The other side's GPU.
      talk: Messages to the other side.
    """

    def __init__(self, job: Job, sends: bool, gpu: int, other: int, talk: multiprocessing.connection.Connection):
        self.job, self.sends, self.gpu, self.other, self.talk = job, sends, gpu, other, talk
        self.device = torch.device("cuda", gpu)
        self.buckets = fill(job.parts, job.bucket_nbytes)
        self.sources = {name: self.drawn(name) for name in job.sources} if sends else {}
        new = functools.partial(torch.empty, dtype=torch.bfloat16, device=self.device)
        self.targets = {} if sends else {name: new(shape) for name, shape in job.targets.items()}
        self.flat = {name: target.view(-1) for name, target in self.targets.items()}
        self.codes: dict[str, torch.Tensor] = {}
        self.scales: dict[str, torch.Tensor] = {}

    def drawn(self, name: str) -> torch.Tensor:
        """A source's values."""
        seed = list(self.job.sources).index(name)
        generator = torch.Generator(self.device).manual_seed(seed)
        shape, dtype = self.job.sources[name], getattr(torch, self.job.dtype)
        return torch.randn(shape, dtype=dtype, device=self.device, generator=generator)

    def bucket(self, device: torch.device | None = None, **more: Any) -> torch.Tensor:
        """Memory for a bucket."""
        return torch.empty(self.job.bucket_nbytes // 2, dtype=torch.bfloat16, device=device or self.device, **more)

    def pack(self, bucket: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
        """Converts pieces of the sources into a bucket; what of it is used."""
        for piece in pieces:
            part = self.job.parts[piece.part]
            rows = part.view(self.sources[part.source])[piece.first : piece.stop]
            bucket[piece.offset : piece.offset + piece.size].view(rows.shape).copy_(rows)
        return bucket[: pieces[-1].offset + pieces[-1].size]

    def unpack(self, bucket: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Copies pieces of a bucket to where they belong."""
        for piece in pieces:
            part = self.job.parts[piece.part]
            at = part.offset + piece.first * part.row_size
            self.flat[part.target][at : at + piece.size].copy_(bucket[piece.offset : piece.offset + piece.size])

    def place(self, part: Part) -> torch.Tensor:
        """Where a part belongs."""
        return self.flat[part.target][part.offset : part.offset + part.rows * part.row_size]

    def tell(self, what: Any = None) -> None:
        """Sends a message."""
        self.talk.send_bytes(pickle.dumps(what))

    def hear(self) -> Any:
        """Waits for one.

        Raises:
          TimeoutError: None came.
        """
        if not self.talk.poll(TIMEOUT.total_seconds()):
            raise TimeoutError("the other side said nothing")
        return pickle.loads(self.talk.recv_bytes())

    def meet(self) -> None:
        """Both sides are here."""
        self.tell()
        self.hear()

    def poison(self) -> None:
        """Overwrites all targets."""
        for target in self.targets.values():
            target.view(torch.uint8).fill_(POISON)
        torch.cuda.synchronize(self.device)

    def differing(self) -> list[str]:
        """Targets that do not hold what they should."""
        parts: dict[str, list[Part]] = {}
        for part in self.job.parts:
            parts.setdefault(part.target, []).append(part)
        wrong = []
        for name, target in self.targets.items():
            runs = [part.view(self.drawn(part.source)).to(torch.bfloat16).reshape(-1) for part in parts[name]]
            want = torch.cat(runs).view(torch.int16)
            if not torch.equal(target.view(-1).view(torch.int16), want):
                wrong.append(name)
        return wrong
