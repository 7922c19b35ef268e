"""The task: add two numbers. Its answers can be checked, so that a reward needs no model.

A prompt reads `3+4=`; its answer is two digits, `07`.
"""

from __future__ import annotations

import numpy as np

ALPHABET = "0123456789+="
"""A token is a place in it."""
PROMPT, ANSWER = 4, 2
"""Tokens of a prompt and of an answer."""


def prompts(rng: np.random.Generator, count: int, largest: int) -> np.ndarray:
    """Random prompts with numbers from 0 to `largest`: int32 [count, PROMPT]."""
    first, second = rng.integers(0, largest + 1, (2, count))
    plus, equals = (np.full(count, ALPHABET.index(sign)) for sign in "+=")
    return np.stack([first, plus, second, equals], 1).astype(np.int32)


def text(tokens: np.ndarray) -> str:
    """A row of tokens as people read it."""
    return "".join(ALPHABET[token] for token in tokens)


def rewards(tokens: np.ndarray) -> np.ndarray:
    """1 where the answer is the sum, else 0.

    Args:
      tokens: [rows, PROMPT + ANSWER], prompts with their answers.

    Returns:
      float32 [rows].
    """
    sums = tokens[:, 0] + tokens[:, 2]
    right = (tokens[:, PROMPT] == sums // 10) & (tokens[:, PROMPT + 1] == sums % 10)
    return right.astype(np.float32)
