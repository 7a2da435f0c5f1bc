"""Tasks on numbers: digits pixel by pixel, a pendulum seen at irregular times, tones at another sampling rate."""

import numpy as np


def digits(images: np.ndarray, classes: np.ndarray, permutation_seed: int | None = None) -> dict[str, np.ndarray]:
    """
    Images read one pixel at a time, row by row; or in an order that is random, and the same for all (Le et al. 2015,
    https://arxiv.org/abs/1504.00941).

    Args:
        images: (n, height, width) or (n, height, width, channels), uint8 or floats in [0, 1].
        classes: (n,) integers.
        permutation_seed: of the random order; None for the order of rows.

    Returns:
        input_features (n, height width, channels), float32 in [0, 1]; labels (n,).

    Raises:
        ValueError: arrays of other shapes.
    """
    if images.ndim not in (3, 4) or classes.shape != images.shape[:1]:
        raise ValueError(
            f"images must be (n, height, width) or (n, height, width, channels) and classes (n,), got {images.shape} "
            f"and {classes.shape}"
        )
    scale = 255 if images.dtype == np.uint8 else 1
    features = images.reshape(len(images), images.shape[1] * images.shape[2], -1).astype(np.float32) / scale
    if permutation_seed is not None:
        features = features[:, np.random.default_rng(permutation_seed).permutation(features.shape[1])]
    return {"input_features": features, "labels": classes.astype(np.int64)}


def pendulum(
    rng: np.random.Generator, number: int, steps: int = 50, grid: int = 100, size: int = 24, duration: float = 10.0
) -> dict[str, np.ndarray]:
    """
    The angle of a pendulum from noisy pictures at irregular times (Schirmer et al. 2022, CRU,
    https://arxiv.org/abs/2111.11344; Smith et al. 2022, S5, section 6.3).

    The pendulum has unit length and mass, g = 9.81 and no friction: theta'' = -9.81 sin(theta), from a random angle and
    a random angular velocity in [-2, 2]. At each of `grid` equal times over `duration` seconds its acceleration gets a
    disturbance for that interval, of the standard deviation 0.1. It is seen at `steps` of these times. A picture is
    `size` x `size`: a disc at the pendulum's end (1 inside, 0 outside, smoothed over its rim), blended with uniform
    noise. The noise's weight wanders between 0 and 1 along each sequence, by steps within [-0.2, 0.2], and is clipped.

    Pictures and constants are this package's own: figures compare with each other, not with those of the papers.

    Returns:
        input_features (n, steps, size²) in [0, 1]; timesteps (n, steps), the seconds since the picture before, the
        grid's interval at the first; times (n, steps); labels (n, steps, 2), sine and cosine of the angle. All float32.

    Raises:
        ValueError: more steps than times.
    """
    if not 1 <= steps <= grid:
        raise ValueError(f"steps must be between 1 and grid = {grid}, got {steps}")
    inner, interval = 10, duration / grid
    angle, velocity = rng.uniform(-np.pi, np.pi, number), rng.uniform(-2, 2, number)
    angles, dt = np.empty((number, grid)), interval / inner
    for column in range(grid):
        angles[:, column] = angle
        disturbance = rng.normal(0, 0.1, number)
        for _ in range(inner):  # symplectic Euler keeps the energy
            velocity = velocity + dt * (-9.81 * np.sin(angle) + disturbance)
            angle = angle + dt * velocity
    chosen = np.sort(np.argsort(rng.random((number, grid)), axis=1)[:, :steps], axis=1)
    times, seen = chosen * interval, np.take_along_axis(angles, chosen, axis=1)
    pixels = (np.arange(size) + 0.5) / size * 2 - 1
    x, y = 0.7 * np.sin(seen)[..., None, None], -0.7 * np.cos(seen)[..., None, None]
    distance = np.hypot(pixels[None, None, None, :] - x, -pixels[None, None, :, None] - y)
    pictures = np.clip((0.2 - distance) * size / 2 + 0.5, 0, 1)
    weight = np.empty((number, steps))
    current = rng.random(number)
    for column in range(steps):
        weight[:, column] = current
        current = np.clip(current + rng.uniform(-0.2, 0.2, number), 0, 1)
    weight = weight[..., None, None]
    pictures = (1 - weight) * pictures + weight * rng.random(pictures.shape)
    return {
        "input_features": pictures.reshape(number, steps, size * size).astype(np.float32),
        "timesteps": np.diff(times, axis=1, prepend=times[:, :1] - interval).astype(np.float32),
        "times": times.astype(np.float32),
        "labels": np.stack([np.sin(seen), np.cos(seen)], axis=-1).astype(np.float32),
    }


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
        ValueError: fewer than 2 classes, a decimation below 1, a rate too low for the highest tone.
    """  # fmt: skip
    if classes < 2 or decimation < 1:
        raise ValueError(f"classes must be at least 2 and decimation at least 1, got {classes} and {decimation}")
    if rate // decimation < 2 * 1200:
        raise ValueError(f"rate / decimation must be at least 2400 for tones up to 1200 Hz, got {rate // decimation}")
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
