"""The sliding puzzle: boards, moves and shuffles, for its problems and its environment.

A board of ``size`` × ``size`` cells is a tuple of numbers, row by row, with 0 for the gap. The solved board counts
from 1, with the gap last. A move is named by the direction in which a tile slides into the gap, as in NeMo-RL's
game.
"""

from __future__ import annotations

import random

Board = tuple[int, ...]

MOVES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Position of the sliding tile relative to the gap: rows down and columns to the right."""

_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
_ONE_DIGIT = 3
"""Size of the largest board with one-digit tiles only; its cells need no space between them."""


def make_solved(size: int) -> Board:
    """Return the solved board."""
    return (*range(1, size * size), 0)


def slide(board: Board, size: int, move: str) -> Board | None:
    """Return the board after one of `MOVES`; None if no tile can make the move."""
    gap = board.index(0)
    rows, columns = MOVES[move]
    row, column = gap // size + rows, gap % size + columns
    if not (0 <= row < size and 0 <= column < size):
        return None
    cells = list(board)
    tile = row * size + column
    cells[gap], cells[tile] = cells[tile], 0
    return tuple(cells)


def render(board: Board, size: int) -> str:
    """Return the board as text: a line for each row, ``_`` for the gap."""
    width = len(str(size * size - 1))
    between = "" if size <= _ONE_DIGIT else " "
    cells = [f"{tile or '_':>{width}}" for tile in board]
    return "\n".join(between.join(cells[first : first + size]) for first in range(0, len(cells), size))


def make_shuffled(generator: random.Random, size: int, num_moves: int) -> tuple[Board, list[str]]:
    """Return a board `num_moves` random moves from the solved one, and moves that solve it; no move undoes the last."""
    board, back = make_solved(size), list[str]()
    while len(back) < num_moves:
        move = generator.choice(sorted(MOVES))
        after = slide(board, size, move)
        if after is not None and (not back or move != back[-1]):
            board = after
            back.append(_OPPOSITE[move])
    return board, back[::-1]
