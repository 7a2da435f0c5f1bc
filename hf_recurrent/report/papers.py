"""The papers' figures on their own tasks, to stand beside ours."""

from dataclasses import dataclass, field
from types import NoneType

from .runs import TaskRun


@dataclass
class Figure:
    """
    Args:
        task, model_type, config: of the runs that it stands beside; other sizes than the paper's are no hindrance, as
            `setting` says which those were.
        value: as the paper gives it.
        source: paper and place.
        number, spread: as numbers, for pictures, the figure and what the paper gives behind ±; None for what is in
            words.
        sizes: of the runs, too: by the name of an argument of the task the type of its value.
    """

    task: str
    model_type: str
    config: dict
    value: str
    setting: str
    source: str
    number: float | None = None
    spread: float | None = None
    sizes: dict[str, type] = field(default_factory=dict)


MIN = "arXiv 2410.01201"
GATELOOP = "arXiv 2311.01927"
S5 = "arXiv 2208.04933"
COPYING = "16 tokens in 4096, 400,000 steps"
HORIZON = "4 layers, width 64"
DEFAULTS = {"num_hidden_layers": 2, "data_controlled": True}


def _copying(model_type: str, layers: int, number: float, spread: float) -> Figure:
    value, config = f"{number} ± {spread} %", {"num_hidden_layers": layers}
    return Figure("selective_copying", model_type, config, value, COPYING, MIN, number / 100, spread / 100)


FIGURES = (
    _copying("mingru", 1, 37.0, 2.3),
    _copying("mingru", 2, 96.8, 3.2),
    _copying("mingru", 3, 99.5, 0.2),
    _copying("minlstm", 1, 37.6, 2.0),
    _copying("minlstm", 2, 85.7, 5.8),
    _copying("minlstm", 3, 96.0, 2.8),
    Figure("memory_horizon", "gateloop", {"data_controlled": True}, "43 %", HORIZON, GATELOOP, 0.43),
    Figure("memory_horizon", "gateloop", {"data_controlled": False}, "25 %", HORIZON, GATELOOP, 0.25),
    Figure("associative_recall", "longhorn", {}, "near 100 % (a plot)", "length 512, width 64", "arXiv 2407.14207"),
    Figure("listops", "s5", {}, "62.15 %", "lengths 500 to 2000", S5, 0.6215),
    Figure("pathfinder", "s5", {}, "95.33 %", "other pictures", S5, 0.9533),
    Figure("pendulum", "s5", {}, "(3.41 ± 0.27) 10⁻³", "a convolutional encoder, 100 epochs", S5, 3.41e-3, 2.7e-4),
    Figure("tones", "s5", {}, "96.52 %, at half the rate 94.53 %", "Speech Commands in place of tones", S5),
    Figure("digits", "s5", {}, "99.65 %", "MNIST, row by row", S5, 0.9965, sizes={"permutation": NoneType}),
    Figure("digits", "s5", {}, "98.67 %", "MNIST, permuted", S5, 0.9867, sizes={"permutation": int}),
)


def beside(run: TaskRun) -> Figure | None:
    """The paper's figure for the task and model of a run."""
    config = DEFAULTS | run.result["config"]
    for figure in FIGURES:
        same = (figure.task, figure.model_type) == (run.result["task"], run.result["model_type"])
        same = same and all(config.get(name) == value for name, value in figure.config.items())
        if same and all(isinstance(run.sizes.get(name), kind) for name, kind in figure.sizes.items()):
            return figure
    return None
