"""The tables and the picture of a GPU measurement; both are made from the results alone."""

from report import table

# What a fraction or factor is called in the tables.
COLUMNS = {
    "gigabytes_per_second": "GB/s",
    "of_copy": "of the copy's speed",
    "of_add": "time / torch.add's",
    "times_floor": "time / its bytes at the copy's speed",
    "of_mamba_ssm": "time / mamba_ssm's",
    "times_pytorch": "time / PyTorch's",
    "times_ours": "time / ours",
    "times_faster": "times faster than cuDNN",
    "of_model_without_recurrence": "speed / without recurrence",
}
TITLES = {
    "copy": "Memory",
    "scan": "linear_scan",
    "cells": "Fused cells and complex recurrences",
    "long": "One row of a long sequence",
    "longhorn": "Longhorn",
    "convolution": "The short convolution",
    "elementwise": "What comes after a recurrence",
    "heads": "GateLoop, heads of d_k x d_v states",
    "peers": "Other scans, forward",
    "vocabulary": "Logits and their loss",
    "layers": "A layer's training step against cuDNN",
    "step": "Training steps of models of 125M parameters",
    "decode": "One token, in a graph",
}


def _goals(results: list[dict]) -> list[list[str]]:
    """Rows of [what, worst measured, asked for]; what has not been measured is said, since it is not met either."""

    def values(section, field, keep=lambda row: True):
        return [row[field] for row in results if row["section"] == section and field in row and keep(row)]

    def full(name):  # the goal is for as many channels as fill the GPU
        return lambda row: row["direction"] == name and row["shape"][0] * row["shape"][2] >= 8192

    def fused(dtype):
        return lambda row: row["dtype"] == dtype and not row["name"].startswith("linear")

    goals = [
        ("linear_scan forward, of the copy's speed", min, values("scan", "of_copy", full("forward")), "≥ 0.88"),
        ("linear_scan forward, time over torch.add's", max, values("scan", "of_add", full("forward")), "≤ 1.05"),
        ("linear_scan backward, of the copy's speed", min, values("scan", "of_copy", full("backward")), "≥ 0.85"),
        ("fused cells in float32, of the copy's speed", min, values("cells", "of_copy", fused("float32")), "≥ 0.8"),
        ("fused cells in bfloat16", min, values("cells", "of_copy", fused("bfloat16")), "≥ 0.8"),
        ("S5, constant", min, values("cells", "of_copy", lambda row: row["name"] == "linear, complex and constant"),
         "≥ 0.8"),
        ("S5, irregular times", min, values("cells", "of_copy", lambda row: row["name"].startswith("s5")), "≥ 0.8"),
        ("(1, 1M, 1024) forward, of the copy's speed", min,
         values("long", "of_copy", lambda row: (row["shape"], row["direction"]) == ([1, 2**20, 1024], "forward")
                and row["name"] == "linear"),
         "≥ 0.7"),
        ("Longhorn m = 16, forward + backward, time over its bytes'", max, values("longhorn", "times_floor"), "≤ 4"),
        ("Longhorn m = 16, time over mamba_ssm's", max, values("longhorn", "of_mamba_ssm"), "≤ 1"),
        ("other scans (fla's HGRN, accelerated-scan, associative_scan), time over linear_scan's", min,
         values("peers", "times_ours"), "> 1"),
        ("minGRU layer, times faster than cuDNN's GRU, L 512", min,
         values("layers", "times_faster", lambda row: row["name"] == "MinGRU" and row["shape"][1] == 512), "≥ 175"),
        ("minLSTM layer, times faster than cuDNN's LSTM, L 512", min,
         values("layers", "times_faster", lambda row: row["name"] == "MinLSTM" and row["shape"][1] == 512), "≥ 235"),
        ("either layer, times faster than cuDNN's, L 4096", min,
         values("layers", "times_faster", lambda row: row["shape"][1] == 4096), "≥ 1300"),
        ("training step, speed over that without recurrence", min,
         values("step", "of_model_without_recurrence"), "≥ 0.85"),
    ]  # fmt: skip
    return [[what, f"{worst(found):.3g}" if found else "not measured", asked] for what, worst, found, asked in goals]


def _machine(run: dict) -> str:
    about = run["machine"]
    return f"{about['gpu']}, torch {about['packages']['torch']}, {about['date'][:10]}"


def markdown(document: dict) -> str:
    results, lines = document["results"], []
    measured = {row["section"] for row in results}  # a section may have begun when time was up
    for run in document["runs"]:
        copy = run.get("copy_gigabytes_per_second")
        sections = ", ".join(name for name in run["seconds"] if name in measured) or "nothing"
        lines += [
            f"- {sections}: {_machine(run)}, commit {run['machine']['commit']}, `{run['command']}`, "
            f"{sum(run['seconds'].values()):.0f} s{f', copy {copy:.0f} GB/s' if copy else ''}."
        ]
    if document["tiny"]:
        lines += ["", "Tiny sizes: these times say nothing."]
    else:
        lines += ["", *table(["what", "the worst measured", "asked for"], _goals(results))]
    for row in results:
        if row["section"] == "check":
            lines += ["", f"{row['cases'] - len(row['failures'])} of {row['cases']} checks {row['name']} are right."]
            lines += [f"- {failure['case']}: {failure['error']}" for failure in row["failures"]]
        elif row["section"] == "sanitizer":
            said = "; ".join(row["summary"]) or row.get("output", "").strip().replace("\n", " | ")
            lines += ["", f"compute-sanitizer {row['name']}: status {row['status']}. {said}"]
    for section, title in TITLES.items():
        rows = [row for row in results if row["section"] == section]
        if not rows:
            continue
        fields = [field for field in COLUMNS if any(field in row for row in rows)]
        how = ["timed"] if any("timed" in row for row in rows) else []
        header = ["", "shape", "dtype", "direction", *how, "µs", *(COLUMNS[field] for field in fields)]
        body = [
            [
                row["name"],
                str(tuple(row.get("shape", ()))) if "shape" in row else "",
                row.get("dtype", ""),
                row.get("direction", ""),
                *(row.get(field, "") for field in how),
                f"{row['microseconds']:.1f}",
                *(f"{row[field]:.3g}" if field in row else "" for field in fields),
            ]
            for row in rows
        ]
        lines += ["", f"### {title}", "", *table(header, body)]
    for section, missed in document["not_measured"].items():
        lines += ["", f"Not measured of {section}:", "", *(f"- {what}: {reason}" for what, reason in missed.items())]
    return "\n".join(lines) + "\n"


def draw(document: dict, path: str) -> None:
    """One panel of bars for each kind of measurement that has a ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = [
        (("scan", "long", "cells"), "of_copy", "of the copy's speed (longer is better)", "forward", 0.88),
        (("scan", "long", "cells"), "of_copy", "of the copy's speed (longer is better)", "backward", 0.85),
        (("longhorn",), "times_floor", "time / its bytes at the copy's speed (shorter is better)", None, 4),
        (("heads",), "of_copy", "of the copy's speed (longer is better)", "forward", None),
        (("heads",), "of_copy", "of the copy's speed (longer is better)", "backward", None),
        (("peers",), "times_ours", "time / linear_scan's", None, 1),
        (("heads",), "times_ours", "time / gateloop_heads_scan's", None, 1),
        (("layers",), "times_faster", "times faster than cuDNN", None, None),
        (("step",), "of_model_without_recurrence", "speed / the model's without recurrence", None, 0.85),
    ]
    panels = []
    for sections, field, label, direction, goal in kinds:
        rows = [
            row
            for row in document["results"]
            if row["section"] in sections and field in row and direction in (None, row["direction"])
        ]
        if rows:
            panels.append((rows, field, label, direction, goal))
    heights = [1 + 0.27 * len(rows) for rows, *_ in panels] or [1]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(10, sum(heights) + 1), squeeze=False, layout="constrained", height_ratios=heights
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (rows, field, label, direction, goal) in zip(axes.flat, panels, strict=False):
        names = [f"{row['name']} {tuple(row['shape'])} {row['dtype']}" for row in rows]
        bars = axis.barh(range(len(rows)), [row[field] for row in rows], 0.75, color="#1f5f8b")
        axis.bar_label(bars, [f"{row[field]:.2f}" for row in rows], padding=3, fontsize=8)
        axis.set_yticks(range(len(rows)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.set_title(", ".join(filter(None, (", ".join(dict.fromkeys(row["section"] for row in rows)), direction))))
        axis.spines[["top", "right"]].set_visible(False)
        if goal is not None:
            axis.axvline(goal, color="#b5651d", linewidth=1, linestyle="--")
        if field == "times_faster":
            axis.set_xscale("log")
        axis.margins(x=0.12)
    figure.suptitle("; ".join(dict.fromkeys(_machine(run) for run in document["runs"])))
    figure.savefig(path, dpi=80)
    plt.close(figure)
