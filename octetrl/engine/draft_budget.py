"""How many drafts each sequence gets, and whether drafts are made at all: what recent forwards say.

    chance        of a sequence's next draft to be right, from its recent drafts and those of all
    gain          of its i-th draft: chance^i tokens
    seconds(n)    of a forward of n rows, measured; in between and beyond by a line
    drafts        the n that maximises (sequences + sum of the largest gains) / seconds(n)

Drafts are made while they give more tokens a second than forwards without them. Both are measured, for each size of
batch: first some forwards without drafts, then a trial with drafts. If the trial gains too little, the next one comes
after `FIRST_PAUSE` forwards, and each time twice as many. A trial in which no draft is right ends after fewer forwards
the more sequences there are (`MISSES`). While drafts are made, the measurement without them is repeated from time to
time.

A ragged rollout runs through many sizes of batch, and a small model's rollout takes less time than a few trials. So
what drafts have cost is counted over all sessions of an engine, with the graphs that they captured. No trial begins
while that is more than `LOSS_SHARE` of the decoding time (`DraftLosses`).

Only the number of forwards depends on this, and no token (speculation.py). B sequences, K drafts of one at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

PRIOR_CHANCE, PRIOR_WEIGHT = 0.5, 2.0  # of a sequence without drafts, in drafts
MEMORY = 0.9  # of what earlier drafts of a sequence say, for each forward
SLOWER = 0.003  # a forward's time for each further row, where nothing was measured
SAMPLES = 9  # forwards whose median counts
REFERENCES = 5  # forwards without drafts before a trial
TRIAL, WINDOW = 6, 24  # forwards with drafts before the first judgement, and those of later ones
MISSES = 12  # times that a sequence got no token from its drafts, all in a row, after which a trial ends at once
FIRST_PAUSE, LONGEST_PAUSE = 128, 4096  # forwards without drafts after a trial that gained too little
MOST_TIMES = 4  # a forward with drafts counts at most as so many without: something else took longer
REFERENCE_AGE = 512  # forwards with drafts after which those without are measured again
LOSS_SHARE = 0.01  # of the decoding time, that drafts may have cost when a trial begins


class ForwardTimes:
    """Seconds of forwards by number of rows."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._known: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, num_rows: int, seconds: float) -> None:
        self._samples.setdefault(num_rows, deque(maxlen=SAMPLES)).append(seconds)
        self._known = None

    def seconds(self, size_n: np.ndarray) -> np.ndarray:
        """float64 [n]; relative ones before anything was measured."""
        if self._known is None:
            sizes = sorted(self._samples)
            medians = np.array([_median(self._samples[size]) for size in sizes])
            self._known = np.array(sizes, dtype=np.float64), np.maximum.accumulate(medians)
        known_m, seconds_m = self._known
        if not len(known_m):
            return 1 + SLOWER * size_n
        beyond_n = np.maximum(size_n - known_m[-1], 0)
        times_n: np.ndarray = np.interp(size_n, known_m, seconds_m) * (1 + SLOWER * beyond_n)
        return times_n


class DraftBudget:
    """Numbers of drafts. `max_rows`: of a forward; `padded`: rows of a forward with its idle ones."""

    def __init__(self, max_drafts: int, max_rows: int, padded: Callable[[int], int], times: ForwardTimes) -> None:
        self._max_drafts, self._max_rows, self._padded, self._times = max_drafts, max_rows, padded, times
        self._right_R, self._tried_R = np.zeros(max_rows), np.zeros(max_rows)
        self._epoch_R = np.full(max_rows, -1, dtype=np.int64)
        self._right, self._tried = PRIOR_CHANCE * 8, 8.0  # of all sequences
        self._sizes: dict[int, np.ndarray] = {}
        self._power_K = np.arange(1, max_drafts + 1)

    def note(self, row_B: np.ndarray, epoch_B: np.ndarray, drafted_B: np.ndarray, right_B: np.ndarray) -> None:
        """Takes the result of a forward: drafts of each sequence, and how many of them were right."""
        same_B = self._epoch_R[row_B] == epoch_B
        tried_B = right_B + (right_B < drafted_B)
        self._right_R[row_B] = np.where(same_B, MEMORY * self._right_R[row_B], 0.0) + right_B
        self._tried_R[row_B] = np.where(same_B, MEMORY * self._tried_R[row_B], 0.0) + tried_B
        self._epoch_R[row_B] = epoch_B
        right, tried = float(right_B.mean()), float(tried_B.mean())
        self._right, self._tried = MEMORY * self._right + right, MEMORY * self._tried + tried

    def chance(self, row_B: np.ndarray, epoch_B: np.ndarray) -> np.ndarray:
        """Each sequence's estimate, float64 [B]."""
        same_B = self._epoch_R[row_B] == epoch_B
        overall = (self._right + PRIOR_CHANCE) / (self._tried + 1)
        right_B = PRIOR_WEIGHT * overall + np.where(same_B, self._right_R[row_B], 0.0)
        chance_B: np.ndarray = right_B / (PRIOR_WEIGHT + np.where(same_B, self._tried_R[row_B], 0.0))
        return chance_B.clip(0.01, 0.99)

    def drafts(self, row_B: np.ndarray, epoch_B: np.ndarray, at_least: int) -> list[int]:
        """The largest number of drafts of each sequence in the next forward. `at_least`: where there are rows."""
        num_sequences = len(row_B)
        size_n = self._sizes_of(num_sequences)
        if not len(size_n):
            return [0] * num_sequences
        gain_BK = self.chance(row_B, epoch_B)[:, None] ** self._power_K
        order = np.argsort(-gain_BK, axis=None, kind="stable")
        gained = np.concatenate(([0.0], gain_BK.ravel()[order].cumsum()))
        further_n = np.minimum(size_n - num_sequences, len(order))
        best = int(np.argmax((num_sequences + gained[further_n]) / self._times.seconds(size_n)))
        count_B = np.bincount(order[: further_n[best]] // self._max_drafts, minlength=num_sequences)
        floor_B = np.maximum(count_B, at_least)
        if num_sequences + floor_B.sum() <= self._max_rows:
            count_B = floor_B
        counts: list[int] = count_B.tolist()
        return counts

    def _sizes_of(self, num_sequences: int) -> np.ndarray:
        """Sizes that a forward of these sequences can have. At each size its rows are all used."""
        if num_sequences not in self._sizes:
            most = min(self._max_rows, num_sequences * (1 + self._max_drafts))
            sizes = {self._padded(rows) for rows in range(num_sequences, most + 1)}
            self._sizes[num_sequences] = np.array(sorted(sizes), dtype=np.int64)
        return self._sizes[num_sequences]


class DraftLosses:
    """Seconds that a source's drafts have cost, in all sessions. What they gained pays for what they cost before."""

    def __init__(self) -> None:
        self._decoded = self._lost = 0.0

    @property
    def allow_trial(self) -> bool:
        return self._lost <= LOSS_SHARE * self._decoded

    def count(self, seconds: float, without: float) -> None:
        """Counts a forward, or several. `without`: seconds that its tokens take without drafts."""
        self._decoded += seconds
        self._lost = max(0.0, self._lost + seconds - without)


class DraftSwitch:
    """Whether drafts pay. `losses`: of all sessions."""

    def __init__(self, min_gain: float, losses: DraftLosses) -> None:
        self._always, self._least = min_gain == 0, 1 + min_gain
        self._losses = losses
        self._on: int | None = None  # the size at which drafts are tried or made
        self._size = 0  # of the batch, padded
        self._plain: dict[int, deque[float]] = {}  # seconds of forwards without drafts
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # seconds, tokens of a sequence
        self._age = 0  # forwards with drafts since those without were measured
        self._pause, self._next_pause = 0, FIRST_PAUSE

    @property
    def in_trial(self) -> bool:
        """Whether each sequence should have a draft, so that something is learnt."""
        return self._always or len(self._recent) < TRIAL

    def is_on(self, size: int) -> bool:
        """Whether the next forward of a batch of this padded size may have drafts."""
        if self._always:
            return True
        is_known = self._pause == 0 and len(self._plain.get(size, ())) >= REFERENCES
        return is_known and (size == self._on or self._losses.allow_trial)

    def count_plain(self, size: int, seconds: float | None) -> None:
        """Counts a forward without drafts. `seconds` None: something else took part of the time."""
        self._meet(size)
        self._pause = max(0, self._pause - 1)
        if seconds is not None:
            self._plain.setdefault(size, deque(maxlen=SAMPLES)).append(seconds)
            self._losses.count(seconds, seconds)

    def count_drafted(self, size: int, seconds: float | None, tokens: float, captures: bool = False) -> None:
        """Counts a forward while drafts are made. `tokens`: for each sequence, in the mean. `captures`: the time of a
        capture is in `seconds`, so the forward says nothing about later ones."""
        self._meet(size)
        self._on = size
        plain = self._plain.get(size)
        if seconds is None or not plain:
            return
        self._losses.count(seconds, tokens * _median(plain))
        if captures:
            return
        self._recent.append((min(seconds, MOST_TIMES * _median(plain)), tokens))
        self._age += 1
        if len(self._recent) < TRIAL and not self._missed_all(size):
            return
        with_drafts = sum(tokens for _, tokens in self._recent) / sum(seconds for seconds, _ in self._recent)
        if with_drafts * _median(plain) < self._least:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self._recent.clear()
            self._on = None
        elif len(self._recent) == WINDOW:
            self._next_pause = FIRST_PAUSE
        if self._age >= REFERENCE_AGE:
            self._plain.pop(size, None)
            self._recent.clear()
            self._age = 0

    def _missed_all(self, size: int) -> bool:
        """Whether the trial has missed so often that it would end no other way."""
        return len(self._recent) * size >= MISSES and all(tokens <= 1 for _, tokens in self._recent)

    def _meet(self, size: int) -> None:
        if size != self._size:
            self._size, self._next_pause = size, FIRST_PAUSE
            self._pause = min(self._pause, FIRST_PAUSE)
            self._recent.clear()
            self._on = None
            self._age = 0


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]
