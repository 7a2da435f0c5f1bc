"""What the report's pictures show, by what stands on matplotlib's axes."""

import io

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from hf_recurrent.report import papers, pictures
from hf_recurrent.report.runs import Measured
from hf_recurrent.tasks.settings import TaskTraining
from hf_recurrent.tasks.train import train_task


def drawn(draw, size=(9, 4)):
    figure = Figure(size, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    figure.savefig(io.BytesIO(), format="png")
    return figure


def legend_of(figure):
    (legend,) = figure.legends or filter(None, (axes.get_legend() for axes in figure.axes))
    return legend


def ticks(axis):
    low, high = sorted(axis.get_view_interval())
    return [
        label.get_text()
        for places, labels in ((axis.get_majorticklocs(), axis.get_majorticklabels()),)
        for place, label in zip(places, labels, strict=True)
        if low <= place <= high
    ] + [label.get_text() for label in axis.get_minorticklabels() if label.get_text()]


PANELS = {"layers": {"ours, one seed": [(1, 0.9, None), (3, 0.95, None)], "several": [(1, 0.2, 0.1), (3, 0.3, None)]}}
THEIRS = {"layers": {"the paper's": [(1, 0.37, 0.02), (2, 0.968, 0.03), (3, 0.995, None)]}}


def test_a_legend_covers_no_point():
    figure = drawn(pictures.sweep(PANELS, "accuracy", THEIRS), pictures.sweep_size(PANELS, THEIRS))
    legend, axes = legend_of(figure), figure.axes[0]
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert [text.get_text() for text in legend.get_texts()] == ["ours, one seed", "several", "the paper's"]
    extent = legend.get_window_extent()
    assert extent.x0 >= 0 and extent.y0 >= 0 and extent.x1 <= figure.bbox.width


def test_bars_stand_where_there_is_a_deviation():
    figure = drawn(pictures.sweep(PANELS, "accuracy", THEIRS))
    found = {bars.get_label(): bars for bars in figure.axes[0].containers}
    assert sorted(found) == ["several", "the paper's"]  # so that the legend shows none for one seed
    assert all(isinstance(bars, ErrorbarContainer) for bars in found.values())
    (ends,) = found["the paper's"].lines[2]
    lengths = [np.ptp(segment[:, 1]) for segment in ends.get_segments() if len(segment)]
    assert lengths[:2] == pytest.approx([0.04, 0.06]) and not np.isfinite(lengths[2:]).any()


def test_the_papers_deviations_are_numbers_too():
    spreads = {figure.value: (figure.number, figure.spread) for figure in papers.FIGURES if "±" in figure.value}
    assert len(spreads) == 7
    assert spreads["37.0 ± 2.3 %"] == pytest.approx((0.37, 0.023))
    assert spreads["(3.41 ± 0.27) 10⁻³"] == pytest.approx((3.41e-3, 2.7e-4))


@pytest.mark.parametrize(
    "low, high", [(2.9, 3.3), (2.9, 5.5), (0.4, 2.4), (0.01, 3), (1e-5, 4), (1e-5, 2e-5), (9, 20000)]
)
def test_log_axes_have_plain_numbers(low, high):
    curve = [{"step": 1, "loss": high, "mse": high}, {"step": 400_000, "loss": low, "mse": low}]
    rows = [{"from": 1, "to": 1, "perplexity": high}, {"from": 2**20, "to": 2**21, "perplexity": low}]
    for draw in (
        pictures.learning({"one": [curve]}, "mse"),
        pictures.extrapolation([Measured(None, "one", {"by_position": rows})], {}),
        pictures.sweep({"length": {"one": [(64, low, None), (2**20, high, None)]}}, "mse", {}),
    ):
        for axes in drawn(draw).axes:
            if axes.axison:
                for axis in (axes.xaxis, axes.yaxis):
                    found = ticks(axis)
                    assert 2 <= len(found) <= 12
                    assert all(set(text) <= set("0123456789.,") for text in found), found


@pytest.mark.parametrize("number", [1, 12, 45])
def test_no_two_lines_look_alike(number):
    curves = {f"run {k}": [[{"step": 1, "loss": 1.0, "accuracy": 0.5}]] for k in range(number)}
    measured = [Measured(None, name, {"by_position": [{"from": 1, "to": 1, "perplexity": 5.0}]}) for name in curves]
    panels = {"length": {name: [(1, 0.5, None), (2, 0.6, 0.1)] for name in curves}}
    for draw in (
        pictures.learning(curves, "accuracy"),
        pictures.extrapolation(measured, {}),
        pictures.sweep(panels, "accuracy", {}),
    ):
        lines = [line for line in drawn(draw, (9, 20)).axes[0].lines if line.get_linestyle() != "None"]
        looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
        assert len(looks) == len(lines) == number


def test_labels_are_no_formulas():
    names = ["_private", r"a $\\frac{$ b", "plain"]
    curves = {name: [[{"step": 1, "loss": 1.0, "accuracy": 0.5}]] for name in names}
    legend = legend_of(drawn(pictures.learning(curves, "accuracy")))
    assert len(legend.get_texts()) == 3
    drawn(pictures.texts({name: [{"step": 1, "loss": 1.0}] for name in names}, ["loss"]))


def test_transitions_are_of_an_example_with_a_reset(tmp_path):
    config = {"hidden_size": 8, "num_hidden_layers": 1}
    for reset, there in ((0.02, True), (0.0, False)):
        sizes = {"length": 12, "reset": reset}
        training = TaskTraining("memory_horizon", sizes, "gateloop", config, max_steps=1, eval_examples=1, batch_size=1)
        train_task(training, tmp_path / str(reset))
        layers, resets = pictures.learned_transitions(tmp_path / str(reset), sizes)
        assert resets.any() == there and layers[0].shape[0] == len(resets) == 12
        label = drawn(pictures.transitions(layers, resets)).axes[0].get_xlabel()
        assert ("a reset" in label) == there
