"""Digits drawn from a seed: a data set that needs no file, no network and no licence.

Purpose: train anywhere, and say so: the set is called synthetic wherever it is named.
Invariant: integers alone decide every pixel, so a seed gives the same bytes on every machine, and
the first N samples are the same however many are asked for.
Callers: this package alone.

All chance comes from one SHAKE-128 stream a split. An extendable-output hash is what the prefix
promise needs: a shorter output is the beginning of a longer one.
"""

import hashlib
import itertools
from typing import Final

import torch
from torch import Tensor

NUM_TRAIN: Final = 60_000
NUM_TEST: Final = 10_000

_SIDE: Final = 28
_NUM_PIXELS: Final = _SIDE * _SIDE
# Small enough that one epoch of a few thousand samples teaches the digits.
_SHIFT_MAX: Final = 1
_WIDTHS: Final = (3, 4)
_HEIGHTS: Final = (2, 3)
_SLANTS: Final = (-1, 0, 1)

# A sample takes this many bytes of the stream before its noise; see `draw`.
_NUM_CHOICES: Final = 8

# Seven rows of five pixels a digit.
_FONT: Final = (
    (".###.", "#...#", "#..##", "#.#.#", "##..#", "#...#", ".###."),
    ("..#..", ".##..", "#.#..", "..#..", "..#..", "..#..", "#####"),
    (".###.", "#...#", "....#", "..##.", ".#...", "#....", "#####"),
    ("####.", "....#", "....#", ".###.", "....#", "....#", "####."),
    ("#...#", "#...#", "#...#", "#####", "....#", "....#", "....#"),
    ("#####", "#....", "#....", "####.", "....#", "....#", "####."),
    (".####", "#....", "#....", "####.", "#...#", "#...#", ".###."),
    ("#####", "....#", "...#.", "..#..", "..#..", ".#...", ".#..."),
    (".###.", "#...#", "#...#", ".###.", "#...#", "#...#", ".###."),
    (".###.", "#...#", "#...#", ".####", "....#", "....#", ".###."),
)


def draw(split: str, num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw the first ``num_samples`` of a split.

    Returns:
        Images ``(num_samples, 28, 28)`` in uint8 and labels ``(num_samples,)`` in int64.
    """
    num_bytes = _NUM_CHOICES + _NUM_PIXELS
    stream = hashlib.shake_128(f"elastic_mnist synthetic {split} {seed}".encode()).digest(num_samples * num_bytes)
    chance = torch.frombuffer(bytearray(stream), dtype=torch.uint8).view(num_samples, num_bytes)

    choices = chance[:, :_NUM_CHOICES].long()
    labels = (choices[:, 0] * 256 + choices[:, 1]) % len(_FONT)
    shapes = _shapes()  # (10, num_variants, 784)
    variants = (choices[:, 2] * 65_536 + choices[:, 3] * 256 + choices[:, 4]) % shapes.shape[1]
    images = shapes.flatten(0, 1)[labels * shapes.shape[1] + variants]  # (num_samples, 784), 0 or 1
    # Ink of at most 191 and noise of at most 56 fit in a byte together.
    images *= (128 + choices[:, 5] % 64).to(torch.uint8)[:, None]
    # Squared, so that most of the paper stays dark, as it does in MNIST; 15 squared still fits in a byte.
    noise = chance[:, _NUM_CHOICES:] >> 4
    images += (noise * noise) >> 2
    return images.view(num_samples, _SIDE, _SIDE), labels


def _shapes() -> Tensor:
    """Return every digit in every size, slant and place, ``(10, num_variants, 784)``, 1 where there is ink."""
    variants = []
    for rows, width, height, slant in itertools.product(_FONT, _WIDTHS, _HEIGHTS, _SLANTS):
        glyph = torch.tensor([[pixel == "#" for pixel in row] for row in rows], dtype=torch.uint8)
        glyph = glyph.repeat_interleave(height, 0).repeat_interleave(width, 1)
        top, left = ((_SIDE - size) // 2 for size in glyph.shape)
        # The canvas has a margin, so that a window on it is a shift.
        canvas = torch.zeros(_SIDE + 2 * _SHIFT_MAX, _SIDE + 2 * _SHIFT_MAX, dtype=torch.uint8)
        for index, row in enumerate(glyph):
            lean = slant * (glyph.shape[0] // 2 - index) // 6
            start = _SHIFT_MAX + left + lean
            canvas[_SHIFT_MAX + top + index, start : start + len(row)] = row
        windows = canvas.unfold(0, _SIDE, 1).unfold(1, _SIDE, 1)  # (shifts, shifts, 28, 28)
        variants.append(windows.reshape(-1, _NUM_PIXELS))
    return torch.cat(variants).view(len(_FONT), -1, _NUM_PIXELS)
