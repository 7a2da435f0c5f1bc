"""The papers' tasks: what each example says, worked out again by a solver that knows nothing of the generator."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from mnist import write_digits, write_idx

from hf_recurrent.tasks import TASKS, build, digits, generate
from hf_recurrent.tasks.digits import mixed, read_idx
from hf_recurrent.tasks.listops import VOCABULARY

SMALL = {
    "selective_copying": {"length": 40, "data_tokens": 5, "vocab_size": 9},
    "associative_recall": {"length": 48, "pairs": 6, "vocab_size": 30},
    "memory_horizon": {"length": 50},
    "induction_heads": {"length": 20},
    "listops": {"shortest": 20, "longest": 60},
    "pendulum": {"steps": 7, "grid": 20},
    "pathfinder": {"size": 24, "length": 9, "distractors": 2},
    "tones": {"rate": 3000, "seconds": 0.5},
}


@pytest.fixture
def small(tmp_path):
    write_digits(tmp_path, "t10k", 80)
    return SMALL | {"digits": {"folder": str(tmp_path), "permutation": 2}}


@pytest.mark.parametrize("name", TASKS)
def test_seeds_splits_and_datasets(name, small):
    first, again = generate(name, 6, seed=3, **small[name]), generate(name, 6, seed=3, **small[name])
    others = [generate(name, 6, seed=4, **small[name]), generate(name, 6, seed=3, split="test", **small[name])]
    for column, array in first.items():
        assert len(array) == 6 and np.array_equal(array, again[column])
    inputs = next(iter(first))
    assert not any(np.array_equal(first[inputs], other[inputs]) for other in others)
    data = build(name, seed=3, train=6, test=2, **small[name])
    assert set(data) == {"train", "test"} and len(data["test"]) == 2
    for column, array in first.items():
        assert np.array_equal(data["train"][:][column], array)


def test_selective_copying():
    made = generate("selective_copying", 200, **SMALL["selective_copying"])
    used = set()
    for ids, labels in zip(made["input_ids"].tolist(), made["labels"].tolist(), strict=True):
        body, tail = ids[:40], ids[40:]
        data = [token for token in body if token != 0]
        assert tail == [8] * 5 and labels == [-100] * 40 + data and len(data) == 5
        used |= {place for place, token in enumerate(body) if token}
        assert all(1 <= token <= 7 for token in data)
    assert used == set(range(40))
    paper = generate("selective_copying", 2)["input_ids"]
    assert paper.shape == (2, 4096 + 16) and (paper[:, :4096] != 0).sum() == 32


def test_associative_recall():
    made = generate("associative_recall", 300, **SMALL["associative_recall"])
    for ids, labels in zip(made["input_ids"].tolist(), made["labels"].tolist(), strict=True):
        table = dict(zip(ids[0:12:2], ids[1:12:2], strict=True))
        assert len(table) == 6 == len(set(table.values())) and all(
            0 < key < 15 <= value < 30 for key, value in table.items()
        )
        asked = [place for place, label in enumerate(labels) if label != -100]
        assert sorted(ids[place] for place in asked) == sorted(table)
        assert all(place >= 12 and place % 2 == 0 and labels[place] == table[ids[place]] for place in asked)


def test_noise_in_associative_recall():
    sizes = SMALL["associative_recall"]
    for noise in (0, 0.25, 1):
        made = generate("associative_recall", 300, noise=noise, **sizes)
        others = made["input_ids"][:, 12:][made["labels"][:, 12:] == -100]
        assert abs((others != 0).mean() - noise) < 0.03
        assert set(others.tolist()) == ({0} if noise == 0 else set(range(noise == 1, 30)))


def test_distances_in_associative_recall_follow_the_power_law():
    labels = generate("associative_recall", 40_000, length=24, pairs=1, vocab_size=8, alpha=0.3)["labels"]
    gaps = np.arange(1, 12)
    expected = gaps**-0.7 / (gaps**-0.7).sum()
    measured = (labels != -100).mean(axis=0)[2::2]
    assert np.abs(measured - expected).max() < 4 * math.sqrt(0.25 / 40_000)


def test_memory_horizon():
    made = generate("memory_horizon", 60, length=50, numbers=4, modulo=7, reset=0.1)
    assert (made["input_ids"] == 4).any() and (made["labels"] != 0).any()
    for ids, labels in zip(made["input_ids"].tolist(), made["labels"].tolist(), strict=True):
        memory: list[int] = []
        for token, label in zip(ids, labels, strict=True):
            memory = [] if token == 4 else [*memory, token]
            pairs = zip(memory, reversed(memory), strict=True)
            half = [x * y for x, y in pairs][: math.ceil(len(memory) / 2)]
            assert label == sum(half[0::2]) % 7 - sum(half[1::2]) % 7 + 7 * (sum(half[0::2]) % 7 < sum(half[1::2]) % 7)
    assert (generate("memory_horizon", 4, reset=1.0)["labels"] == 0).all()


def test_induction_heads():
    made = generate("induction_heads", 200, length=12, vocab_size=5)
    for ids, labels in zip(made["input_ids"].tolist(), made["labels"].tolist(), strict=True):
        assert ids.count(4) == 2 and ids[-1] == 4 and ids.index(4) < 9
        assert labels == [-100] * 11 + [ids[ids.index(4) + 1]]


def test_listops():
    made = generate("listops", 40, shortest=30, longest=200)
    functions = {"[MIN": min, "[MAX": max, "[MED": lambda *v: int(np.median(v)), "[SM": lambda *v: sum(v) % 10}
    seen = set()
    for ids, mask, label in zip(made["input_ids"], made["attention_mask"], made["labels"], strict=True):
        words = [VOCABULARY[token] for token in ids[mask == 1]]
        assert 30 <= len(words) <= 200 and (ids[mask == 0] == 0).all() and (np.diff(mask) <= 0).all()
        # As a nested call in Python, which evaluates it.
        text = "".join({"]": ")]"}.get(word, f"F['{word}'](*[" if word in functions else f"{word},") for word in words)
        text = text.replace(")]", "]),")
        assert eval(text.rstrip(","), {"F": functions}) == label
        depth = np.cumsum([(word in functions) - (word == "]") for word in words])
        assert depth.max() <= 9 and depth[-1] == 0 and (depth[:-1] > 0).all()
        seen |= set(words)
    assert seen == set(VOCABULARY[1:])


def test_digits():
    images = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    rows = digits(images, np.array([3, 7]))
    assert np.allclose(rows["input_features"][1, :, 0] * 255, np.arange(12, 24)) and rows["labels"].tolist() == [3, 7]
    mixed = digits(images, np.array([3, 7]), permutation_seed=1)["input_features"]
    order = np.argsort(mixed[0, :, 0])
    assert np.array_equal(mixed[:, order], rows["input_features"]) and not np.array_equal(order, np.arange(12))
    for bad in ((images, np.array([3])), (images[:0], np.array([])), (images.astype(np.int64), np.array([3, 7]))):
        with pytest.raises(ValueError, match="images must be"):
            digits(*bad)
    with pytest.raises(ValueError, match=r"or floats in \[0, 1\], got float64"):
        digits(images * 1.0, np.array([3, 7]))


def pixels(made):
    return {tuple(np.round(row[:, 0] * 255).astype(int)) for row in made["input_features"]}


def test_digits_of_a_folder(tmp_path):
    images = write_digits(tmp_path, "t10k", 30)
    test = {tuple(image.flatten()) for image in images}
    parts = [pixels(generate("digits", number, 0, split, folder=str(tmp_path))) for number, split in
             ((24, "train"), (3, "validation"), (3, "test"))]  # fmt: skip
    assert set.union(*parts) == test and sum(map(len, parts)) == 30
    # Not the last ones of the file, and the same ones whatever the seed.
    assert parts[1] == {tuple(image.flatten()) for image in images[mixed(30)[24:27]]}
    assert parts[1] == pixels(generate("digits", 3, 1, "validation", folder=str(tmp_path)))
    assert parts[1] != {tuple(image.flatten()) for image in images[24:27]}
    one, other = (generate("digits", 5, seed, folder=str(tmp_path)) for seed in (0, 1))
    assert one["input_features"].shape == (5, 16, 1) and not np.array_equal(one["labels"], other["labels"])

    both = tmp_path / "both"
    both.mkdir()
    write_digits(both, "t10k", 30, ending="")
    train = {tuple(image.flatten()) for image in write_digits(both, "train", 24, ending="", seed=1)}
    assert pixels(generate("digits", 30, 0, "test", folder=str(both))) == test
    last = read_idx(both / "train-images-idx3-ubyte")[22:]
    assert pixels(generate("digits", 2, 0, "validation", folder=str(both))) == {tuple(x.flatten()) for x in last}
    parts = [pixels(generate("digits", number, 0, split, folder=str(both), permutation=3)) for number, split in
             ((22, "train"), (2, "validation"))]  # fmt: skip
    assert {tuple(sorted(row)) for part in parts for row in part} == {tuple(sorted(row)) for row in train}
    with pytest.raises(ValueError, match="number must be at most 2, the digits of the validation split, got 3"):
        generate("digits", 3, 0, "validation", folder=str(both))


def test_files_that_are_not_of_digits(tmp_path):
    with pytest.raises(ValueError, match="digits needs folder=..., where MNIST's files are"):
        generate("digits", 1)
    with pytest.raises(
        FileNotFoundError, match="expected t10k-images-.*-ubyte and t10k-labels.*, or train-images-.* there"
    ):
        generate("digits", 1, folder=str(tmp_path))
    for argument, message in (({"folder": 7}, "folder must be text, got 7"), ({"permutation": 1.5}, "an integer")):
        with pytest.raises(ValueError, match=message):
            generate("digits", 1, **{"folder": str(tmp_path), **argument})
    file = tmp_path / "images.gz"
    write_idx(file, np.zeros((2, 3, 3), np.uint8))
    for damaged, message in (
        (file.read_bytes()[:-9], "images.gz: "),
        (
            gzip.compress(gzip.decompress(file.read_bytes())[:-1]),
            r"expected 34 bytes for the sizes \[2, 3, 3\], got 33",
        ),
        (gzip.compress(b"\x80\x02}q."), "expected bytes in the format of MNIST"),
        (b"", "images.gz: "),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            read_idx(file)


MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"


@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST's test digits are not at ../shared/data/mnist")
def test_real_digits():
    images, classes = (read_idx(MNIST / f"t10k-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    made = digits(images, classes)
    assert made["input_features"].shape == (10_000, 784, 1) and made["input_features"].max() == 1
    assert np.bincount(made["labels"]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_pendulum():
    made = generate("pendulum", 70)
    features, labels = made["input_features"], made["labels"]
    assert features.shape == (70, 50, 576) and features.min() >= 0 and features.max() <= 1
    assert np.allclose((labels**2).sum(-1), 1, atol=1e-6)
    span = made["times"][:, -1] - made["times"][:, 0] + 0.01
    assert np.allclose(np.cumsum(made["timesteps"], axis=1)[:, -1], span, atol=1e-5)
    steps = made["times"] / 0.01
    assert np.allclose(steps, np.round(steps), atol=1e-3) and (made["timesteps"] > 0.0099).all()
    # Where there is no noise, the centre of the rod is half its length from the middle, towards (sin, -cos).
    pictures, pixels = features.reshape(70, 50, 24, 24), (np.arange(24) + 0.5) / 12 - 1
    clear = (pictures == 0).mean((-1, -2)) > 0.8
    assert clear.sum() > 250 and clear[made["times"] < 0.0495].all()
    mass = pictures[clear].sum((-1, -2))
    assert np.abs(mass - (1.5 * 10.3125 + np.pi * 0.75**2)).max() < 1  # the area of the rod, which is round at its ends
    x, y = (pictures[clear].sum(-2) @ pixels) / mass, -(pictures[clear].sum(-1) @ pixels) / mass
    half = 55 / 128
    assert np.abs(x - half * labels[clear][:, 0]).max() < 0.05 and np.abs(y + half * labels[clear][:, 1]).max() < 0.05
    noise = np.abs(pictures.mean((-1, -2)) - 0.5) < 0.05  # and where there is nothing else, it is uniform
    assert noise.sum() > 50 and np.abs(np.quantile(pictures[noise], [0.25, 0.5, 0.75]) - [0.25, 0.5, 0.75]).max() < 0.03


def test_a_pendulum_that_nothing_disturbs_loses_energy_by_friction_alone():
    class Quiet(np.random.Generator):
        def normal(self, *args, **kwargs):
            return np.zeros(kwargs.get("size", args[-1]))

    made = TASKS["pendulum"](Quiet(np.random.PCG64(0)), 20, steps=100)
    angle = np.unwrap(np.arctan2(made["labels"][..., 0], made["labels"][..., 1]), axis=1).astype(np.float64)
    velocity = (angle[:, 2:] - angle[:, :-2]) / 0.02
    energy = velocity**2 / 2 - 3 * 9.81 * np.cos(angle[:, 1:-1])
    lost = 0.1 * np.cumsum(velocity**2, axis=1) * 0.01
    assert np.abs(energy - energy[:, :1] + lost).max() < 0.01 * np.abs(energy).max()
    assert (np.abs(velocity[:, 0]) < 0.8).all()  # it began at rest


def test_pathfinder():
    """Solved by the picture alone: dots are thicker than lines, and gaps of a path are narrower than between paths."""
    made = generate("pathfinder", 60)
    assert made["input_features"].shape == (60, 1024, 1) and 15 < made["labels"].sum() < 45
    for features, label in zip(made["input_features"], made["labels"], strict=True):
        picture = features.reshape(32, 32)
        lit = np.argwhere(picture > 0.25)
        distances = np.hypot(*(lit[:, None] - lit[None]).transpose(2, 0, 1))
        part = np.arange(len(lit))
        for _ in range(len(lit)):  # the least number among the neighbours, until nothing changes
            least = np.where(distances < 2.45, part, len(lit)).min(axis=1)
            if (least == part).all():
                break
            part = least
        squares = np.lib.stride_tricks.sliding_window_view(picture, (2, 2)).min(axis=(2, 3))
        thick = np.argwhere(squares > 0.55)  # the upper left corner of four bright pixels
        groups = np.array([part[np.flatnonzero((lit == place).all(axis=1))[0]] for place in thick])
        far = np.hypot(*(thick[:, None] - thick[None]).transpose(2, 0, 1)).max()
        assert far > 3 and (len(set(groups)) == 1) == bool(label)


def test_pathfinder_is_not_told_by_how_far_apart_the_dots_are():
    made = generate("pathfinder", 400, size=24, length=8, distractors=0)
    joined, distances = made["labels"] == 1, []
    for features in made["input_features"]:
        squares = np.lib.stride_tricks.sliding_window_view(features.reshape(24, 24), (2, 2)).min(axis=(2, 3))
        thick = np.argwhere(squares > 0.55)
        distances.append(np.hypot(*(thick[:, None] - thick[None]).transpose(2, 0, 1)).max())
    assert 150 < joined.sum() < 250 and min(distances) > 3
    told = max(np.mean((np.array(distances) < far) == joined) for far in set(distances))
    assert told < 0.5 + 3 * 0.5 / 400**0.5


def test_tones():
    full, half = (generate("tones", 30, seed=5, decimation=by, noise=0.0) for by in (1, 2))
    assert full["input_features"].shape == (30, 16000, 1) and half["input_features"].shape == (30, 8000, 1)
    assert np.array_equal(full["input_features"][:, ::2], half["input_features"])
    assert np.array_equal(full["labels"], half["labels"]) and len(set(full["labels"].tolist())) > 5
    # The class from the lower tone's mean frequency at the word's beginning, by its crossings of zero.
    for sound, label in zip(full["input_features"][..., 0], full["labels"], strict=True):
        inside = np.flatnonzero(sound)
        spectrum = np.abs(np.fft.rfft(sound[inside[0] : inside[0] + 2000] * np.hanning(2000), 16000))
        strongest = np.argmax(spectrum[150:450]) + 150
        glide = 200 * (1 - 2 * label / 10) / 0.6  # Hz per second
        assert abs(strongest - (200 * (1 + label / 10) + glide * 0.0625)) < 15
    assert np.abs(generate("tones", 3, noise=0.5)["input_features"][:, -100:]).mean() == pytest.approx(0.4, abs=0.05)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: generate("selective_coping", 1), "no task 'selective_coping'; .* is selective_copying"),
        (lambda: generate("listops", 1, split="tests"), "no split 'tests'"),
        (lambda: generate("listops", 0), "number must be at least 1, got 0"),
        (lambda: generate("listops", 2.5), "number must be an integer, got 2.5"),
        (lambda: generate("listops", 1, seed=-1), "seed must be at least 0, got -1"),
        (lambda: generate("tones", 1, noise=math.inf), "noise must be finite, got inf"),
        (lambda: generate("tones", 1, noise=-1), "noise must be at least 0, got -1"),
        (lambda: generate("tones", 1, seconds=0), "seconds must be at least 1 . rate = 6.25e-05, got 0"),
        (lambda: generate("pendulum", 1, duration=0), "duration must be above 0, got 0"),
        (lambda: generate("pendulum", 1, size=0), "size must be at least 1, got 0"),
        (lambda: generate("memory_horizon", 1, length=0), "length must be at least 1, got 0"),
        (lambda: generate("associative_recall", 1, alpha=0), "alpha must be above 0, got 0"),
        (
            lambda: generate("listops", 1, shortest=18, longest=60, max_depth=3, max_arguments=3),
            "no expression has from shortest = 18 to longest = 60 tokens for max_depth = 3 and max_arguments = 3",
        ),
        (lambda: generate("listops", 1, longst=9), "listops has no argument 'longst'; .* is longest"),
        (lambda: generate("listops", 1, longest="long"), "longest must be an integer, got 'long'"),
        (lambda: generate("memory_horizon", 1, reset=True), "reset must be a number, got True"),
        (lambda: build("listops"), "one of train, validation and test must be at least 1"),
        (lambda: generate("selective_copying", 1, length=3), "data_tokens must be between 1 and length = 3, got 16"),
        (lambda: generate("selective_copying", 1, vocab_size=2), "vocab_size must be at least 3"),
        (lambda: generate("associative_recall", 1, length=10, pairs=3), "length must be even and at least 4 pairs = 1"),
        (lambda: generate("associative_recall", 1, vocab_size=100), "vocab_size must be at least 130 for 64 pairs"),
        (lambda: generate("associative_recall", 1, noise=-0.1), "noise must be a probability, got -0.1"),
        (lambda: generate("memory_horizon", 1, reset=1.5), "reset must be a probability, got 1.5"),
        (lambda: generate("memory_horizon", 1, modulo=1), "numbers and modulo must be at least 2, got 5 and 1"),
        (lambda: generate("induction_heads", 1, length=3), "length must be at least 4"),
        (lambda: generate("listops", 1, shortest=9, longest=8), "shortest must be between 4 and longest = 8, got 9"),
        (lambda: generate("listops", 1, max_depth=1), "max_depth and max_arguments must be at least 2"),
        (lambda: generate("listops", 1, max_depth=2), "shortest = 500 to longest = 2000 tokens for max_depth = 2"),
        (lambda: generate("listops", 1, shortest=5, longest=6, max_arguments=2), "no expression has from shortest = 5"),
        (lambda: generate("listops", 1, shortest=6, longest=6, max_arguments=3), "no expression has from shortest = 6"),
        (
            lambda: generate("listops", 1, shortest=100, longest=102, max_depth=3),
            "none of 100,000 random expressions had from shortest = 100 to longest = 102 tokens; max_depth is 3",
        ),
        (lambda: generate("pendulum", 1, steps=101), "steps must be between 1 and grid = 100, got 101"),
        (lambda: generate("pathfinder", 1, length=20), "length must be between 8 and size . 2 - 2 = 14, got 20"),
        (lambda: generate("pathfinder", 1, distractors=-1), "distractors must be at least 0, got -1"),
        (lambda: generate("tones", 1, classes=1), "classes must be at least 2"),
        (lambda: generate("tones", 1, decimation=8), "rate / decimation must be at least 2400"),
    ],
)  # fmt: skip
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
