"""Tasks on numbers: a pendulum seen at irregular times, tones at another sampling rate."""

import numpy as np


def pendulum(
    rng: np.random.Generator, number: int, steps: int = 50, grid: int = 100, size: int = 24, duration: float = 1.0
) -> dict[str, np.ndarray]:
    """
    The angle of a pendulum from noisy pictures at irregular times (Schirmer et al. 2022, CRU,
    https://arxiv.org/abs/2111.11344; Smith et al. 2022, S5, section 6.3), with the constants of the published code.

    The pendulum is a rod of unit length and mass that turns about one end, g = 9.81, friction 0.1: theta'' = -3 g
    sin(theta) - 0.1 theta'. It starts at rest at a random angle. At each of `grid` equal times over `duration` seconds
    its angular velocity gets a normal disturbance of the standard deviation 0.1. It is seen at `steps` of these times.

    A picture is `size` x `size` with the rod in it, white on black and smoothed over its rim, blended with uniform
    noise. How clear it is wanders along each sequence, from a random start in [0, 1], by steps within [-0.2, 0.2] at
    each time, and is clipped to [0, 1]; two thresholds, which are random in [0, 0.25] and [0.75, 1] for each sequence,
    become 0, all noise, and 1, none. The first five times are clear. The rod is drawn by a formula of this package's
    own; the published code draws it with Pillow.

    Returns:
        input_features (n, steps, size²) in [0, 1]; timesteps (n, steps), the seconds since the picture before, the
        grid's interval at the first; times (n, steps); labels (n, steps, 2), sine and cosine of the angle. All float32.

    Raises:
        ValueError: more steps than times; a picture without pixels; a duration of 0 or less.
    """
    if not 1 <= steps <= grid:
        raise ValueError(f"steps must be between 1 and grid = {grid}, got {steps}")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if duration <= 0:
        raise ValueError(f"duration must be above 0, got {duration}")
    interval = duration / grid
    chosen = np.sort(np.argsort(rng.random((number, grid)), axis=1)[:, :steps], axis=1)
    times, seen = chosen * interval, np.take_along_axis(_swings(rng, number, grid, interval), chosen, axis=1)
    clear = np.take_along_axis(_clearness(rng, number, grid), chosen, axis=1).astype(np.float32)[..., None, None]
    features = np.empty((number, steps, size, size), np.float32)
    for rows in np.array_split(np.arange(number), max(1, number // 32)):  # what is drawn takes memory
        noise = rng.random((len(rows), steps, size, size), dtype=np.float32)
        features[rows] = clear[rows] * _rods(seen[rows], size) + (1 - clear[rows]) * noise
    return {
        "input_features": features.reshape(number, steps, size * size),
        "timesteps": np.diff(times, axis=1, prepend=times[:, :1] - interval).astype(np.float32),
        "times": times.astype(np.float32),
        "labels": np.stack([np.sin(seen), np.cos(seen)], axis=-1).astype(np.float32),
    }


def _swings(rng: np.random.Generator, number: int, grid: int, interval: float) -> np.ndarray:
    """(number, grid): the angle of each pendulum at each time, 0 at its lowest."""
    inner = 10
    dt, angle, velocity = interval / inner, rng.uniform(-np.pi, np.pi, number), np.zeros(number)
    angles = np.empty((number, grid))
    for column in range(grid):
        angles[:, column] = angle
        for _ in range(inner):  # symplectic Euler: no energy but by friction is lost
            velocity = velocity + dt * (-3 * 9.81 * np.sin(angle) - 0.1 * velocity)
            angle = angle + dt * velocity
        velocity = velocity + rng.normal(0, 0.1, number)
    return angles


def _clearness(rng: np.random.Generator, number: int, grid: int) -> np.ndarray:
    """(number, grid): how much of each picture is no noise."""
    clear = np.empty((number, grid))
    current = rng.random(number)
    for column in range(grid):
        clear[:, column] = current
        current = np.clip(current + rng.uniform(-0.2, 0.2, number), 0, 1)
    low, high = rng.uniform(0, 0.25, (number, 1)), rng.uniform(0.75, 1, (number, 1))
    clear = np.clip((clear - low) / (high - low), 0, 1)
    clear[:, :5] = 1
    return clear


def _rods(angle: np.ndarray, size: int) -> np.ndarray:
    """(..., size, size): rods of 55 / 128 of the picture's width and 8 / 128 thick, from its middle to their ends."""
    pixels = ((np.arange(size) + 0.5) / size * 2 - 1).astype(np.float32)
    x, y = (turn(angle).astype(np.float32)[..., None, None] for turn in (np.sin, np.cos))  # y points down
    along = np.clip(pixels * x + pixels[:, None] * y, 0, 55 / 64)
    distance = np.hypot(pixels - along * x, pixels[:, None] - along * y)
    return np.clip((4 / 64 - distance) * size / 2 + 0.5, 0, 1)


def tones(
    rng: np.random.Generator,
    number: int,
    classes: int = 10,
    rate: int = 16000,
    seconds: float = 1.0,
    decimation: int = 1,
    noise: float = 0.1,
) -> dict[str, np.ndarray]:
    """
    Words of tones, to be told apart at another sampling rate than in training (as S5 is tested on Speech Commands:
    trained at 16 kHz, read at 8 kHz with `step_rescale=2`; https://arxiv.org/abs/2208.04933, section 6.2).

    A word is a chord that glides: class c sounds two sines, whose frequencies go from 200 (1 + c / `classes`) to
    200 (2 - c / `classes`) Hz, and three times these (at most 1200 Hz, which half the rate holds too). It starts at
    random in the first fifth and takes three fifths of the time, at a random loudness and with random phases, in white
    noise of the standard deviation `noise`, which is drawn at the full rate.

    Args:
        decimation: every so-manieth sample is kept: 1 for `rate`, 2 for half of it. The examples of one seed are the
            same words at every decimation.

    Returns:
        input_features (n, samples, 1) float32; labels (n,).

    Raises:
        ValueError: fewer than 2 classes, a decimation below 1, a rate too low for the highest tone, a time without a
            sample, noise below 0.
    """  # fmt: skip
    if classes < 2 or decimation < 1:
        raise ValueError(f"classes must be at least 2 and decimation at least 1, got {classes} and {decimation}")
    if rate // decimation < 2 * 1200:
        raise ValueError(f"rate / decimation must be at least 2400 for tones up to 1200 Hz, got {rate // decimation}")
    if int(rate * seconds) < 1:
        raise ValueError(f"seconds must be at least 1 / rate = {1 / rate:g}, got {seconds}")
    if noise < 0:
        raise ValueError(f"noise must be at least 0, got {noise}")
    labels = rng.integers(classes, size=number)
    time = np.arange(int(rate * seconds)) / rate
    start = rng.uniform(0, 0.2 * seconds, (number, 1))
    phase, loudness = rng.uniform(0, 2 * np.pi, (2, number, 1)), rng.uniform(0.5, 1, (number, 1))
    inside = (time >= start) & (time < start + 0.6 * seconds)
    low, high = 200 * (1 + labels / classes)[:, None], 200 * (2 - labels / classes)[:, None]
    # The phase of a glide is the integral of its frequency.
    elapsed = np.clip(time - start, 0, 0.6 * seconds)
    cycles = low * elapsed + (high - low) * elapsed**2 / (1.2 * seconds)
    sound = sum(np.sin(2 * np.pi * k * cycles + phase[i]) for i, k in enumerate((1, 3))) / 2
    signal = loudness * np.where(inside, sound, 0) + noise * rng.normal(size=inside.shape)
    return {"input_features": signal[:, ::decimation, None].astype(np.float32), "labels": labels.astype(np.int64)}
