"""Pathfinder: are two dots joined by a dashed path? (Linsley et al. 2018; Long Range Arena)"""

import numpy as np

SPACING = 0.5  # pixels between a path's points
DASH, GAP = 3.0, 1.5  # pixels
APART = 5.0  # pixels, at least, between two paths
MARGIN = 2.0  # pixels to the edge
TRIES = 60  # for each distractor


def _paths(rng: np.random.Generator, number: int, length: float, size: int) -> np.ndarray:
    """(number, points, 2): curves inside the picture, none of which turns by more than 135 degrees."""
    points = int(length / SPACING) + 1
    made = np.empty((number, points, 2))
    missing = np.arange(number)
    while len(missing):
        count = len(missing)
        turns = rng.uniform(-0.75 * np.pi, 0.75 * np.pi, (count, 2, 1))
        share = np.linspace(0, 1, points)
        # The curvature goes evenly from that of one turn to that of another.
        turned = turns[:, 0] * (share - share**2 / 2) + turns[:, 1] * share**2 / 2
        heading = rng.uniform(0, 2 * np.pi, (count, 1)) + turned
        steps = SPACING * np.stack([np.cos(heading), np.sin(heading)], axis=-1)
        curves = np.cumsum(steps, axis=1) + rng.uniform(0, size, (count, 1, 2))
        good = ((curves > MARGIN) & (curves < size - MARGIN)).all(axis=(1, 2))
        made[missing[good]] = curves[good]
        missing = missing[~good]
    return made


def _pairs(rng: np.random.Generator, number: int, length: float, size: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Two times (number, points, 2): paths that are apart, and whose beginnings are no easier to tell from the two ends of
    one path than they must be. They are as far from each other as the first path's end from its beginning, and each
    path leaves its beginning at the angle to the other's at which it leaves to its own end, though on the other side.
    """
    first = np.empty((number, int(length / SPACING) + 1, 2))
    second = np.empty_like(first)
    missing = np.arange(number)
    while len(missing):
        one, other = _paths(rng, len(missing), length, size), _paths(rng, len(missing), length, size)
        towards = _mirrored(one)
        far = np.linalg.norm(one[:, -1] - one[:, 0], axis=1)
        begins = one[:, 0] + far[:, None] * np.stack([np.cos(towards), np.sin(towards)], axis=1)
        turn = (towards + np.pi - _mirrored(other))[:, None]
        x, y = np.moveaxis(other - other[:, :1], -1, 0)
        other = np.stack([np.cos(turn) * x - np.sin(turn) * y, np.sin(turn) * x + np.cos(turn) * y], axis=-1)
        other += begins[:, None]
        good = ((other > MARGIN) & (other < size - MARGIN)).all(axis=(1, 2))
        good[good] = _distance(one[good], other[good]) >= APART
        first[missing[good]], second[missing[good]] = one[good], other[good]
        missing = missing[~good]
    return first, second


def _mirrored(paths: np.ndarray) -> np.ndarray:
    """(n,): the direction from the beginning of each path to its end, mirrored at its direction there."""
    heading, chord = (np.arctan2(*(paths[:, place] - paths[:, 0]).T[::-1]) for place in (1, -1))
    return 2 * heading - chord


def _dashes(rng: np.random.Generator, number: int, points: int) -> np.ndarray:
    """(number, points) bool: what is drawn of paths. Each begins anywhere in a dash or a gap."""
    along = rng.uniform(0, DASH + GAP, (number, 1)) + np.arange(points) * SPACING
    return along % (DASH + GAP) < DASH


def _distance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(n,): the least distance of the points (n, p, 2) from the points (n, q, 2)."""
    difference = first[:, :, None] - second[:, None]
    return np.sqrt((difference**2).sum(-1).min(axis=(1, 2)))


def _drawn(points: np.ndarray, kept: np.ndarray, radius: float, size: int) -> np.ndarray:
    """(n, size, size) in [0, 1]: discs around the points (n, p, 2), where they are kept, (n, p) bool."""
    centres = np.arange(size) + 0.5
    squares = (points[:, :, 0, None, None] - centres[None, None, None]) ** 2
    squares = squares + (points[:, :, 1, None, None] - centres[None, None, :, None]) ** 2
    nearest = np.where(kept[..., None, None], squares, np.inf).min(axis=1)
    return np.clip(radius + 0.5 - np.sqrt(nearest), 0, 1)


def pathfinder(
    rng: np.random.Generator, number: int, size: int = 32, length: int = 14, distractors: int = 6
) -> dict[str, np.ndarray]:
    """
    Are the two dots the ends of one path? (Linsley et al. 2018, https://arxiv.org/abs/1805.08315; read by pixels in
    Long Range Arena, Tay et al. 2020, https://arxiv.org/abs/2011.04006)

    In each picture lie two dashed paths of `length` pixels, and up to `distractors` of a third of that, all at least 5
    pixels apart, which the gaps of the dashes are not: 3 pixels are drawn, 1.5 left out. A dot is a disc of the radius
    1.5 at a path's end. Label 1: the dots are at both ends of one of the two long paths. Label 0: at an end of each.
    Both are equally likely, and in both the dots are equally far apart, and the angles between a path and the straight
    line from its dot to the other are alike, so that none of these alone says anything. A distractor that finds no
    place after 60 tries is left out.

    Pictures and constants are this package's own: figures compare with each other, not with those of the papers.

    Returns:
        input_features (n, size², 1), float32 in [0, 1], row by row; labels (n,).

    Raises:
        ValueError: paths below 8 pixels, or too long for the picture; distractors below 0.
    """
    if not 8 <= length <= size / 2 - 2:
        raise ValueError(f"length must be between 8 and size / 2 - 2 = {size / 2 - 2:g}, got {length}")
    if distractors < 0:
        raise ValueError(f"distractors must be at least 0, got {distractors}")
    first, second = _pairs(rng, number, length, size)
    points = np.concatenate([first, second], axis=1)
    kept = np.concatenate([_dashes(rng, number, first.shape[1]) for _ in range(2)], axis=1)
    labels = rng.integers(2, size=number)
    dots = np.stack([first[:, 0], np.where(labels[:, None] == 1, first[:, -1], second[:, 0])], axis=1)
    for _ in range(distractors):
        short, placed = _paths(rng, number, length / 3, size), np.zeros(number, bool)
        for _ in range(TRIES):
            missing = np.flatnonzero(~placed)
            if not len(missing):
                break
            short[missing] = _paths(rng, len(missing), length / 3, size)
            placed[missing] = _distance(short[missing], points[missing]) >= APART
        kept = np.concatenate([kept, placed[:, None] & _dashes(rng, number, short.shape[1])], axis=1)
        # What was not placed must be in nobody's way.
        points = np.concatenate([points, np.where(placed[:, None, None], short, np.inf)], axis=1)
    lines = _drawn(np.where(np.isfinite(points), points, 0), kept, 0.5, size)
    pictures = np.maximum(lines, _drawn(dots, np.ones((number, 2), bool), 1.5, size))
    return {"input_features": pictures.reshape(number, -1, 1).astype(np.float32), "labels": labels}
