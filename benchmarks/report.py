"""The tables and the picture of a measurement; both are made from the results alone."""

import json
from pathlib import Path

from hf_recurrent.files import replacing, write_whole

PASSES = ("forward", "forward + backward")
LIMITS = {
    "scan": "torch.add on the same bytes",
    "cell": "torch.add on the same bytes",
    "core": "the fused cell's time",
    "step": "the same model with the recurrence replaced by a product",
    "families": "the same model with the recurrence replaced by a product",
    "products": "the model's matrix products alone, without norms, activations, loss and optimizer",
}
FAMILY_GOALS = {
    "minLSTM": "≤ 1.15", "GateLoop, polar": "≤ 1.3", "GateLoop, cartesian": "≤ 1.3", "Longhorn": "≤ 1.8", "S5": "≤ 1.3"
}  # fmt: skip
COLOURS = ("#1f5f8b", "#7fb3d5", "#b5651d", "#e8b887")  # a dark and a light one for each shape
TITLES = {
    "scan": "linear_scan and its peers",
    "cell": "The minGRU cell, activations included",
    "core": "The minGRU cell against minGRU-pytorch's (both with activations)",
    "step": "A training step of the paper's Shakespeare model",
    "families": "A training step of each family, 3 × 384",
    "products": "The same steps against their matrix products",
}


def case_name(row: dict) -> str:
    return f"{tuple(row['shape'])} {row['dtype']} {row['pass']}"


def number(x: float) -> str:
    return f"{x:.2f}" if x < 100 else f"{x:.0f}"


def conditions(about: dict) -> str:
    threads = f"{about['threads']} thread{'' if about['threads'] == 1 else 's'}"
    return f"{about['cpu']}, {threads}, torch {about['packages']['torch']}, {about['date'][:10]}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows]]


def headlines(results: list[dict]) -> list[list[str]]:
    """What was asked for beside what was measured: rows of [what, measured, asked for]."""

    def ratios(section, names, passes, shape=(8, 1024, 768), dtype="float32"):
        return [
            row["ratio"]
            for row in results
            if row["section"] == section and row["name"] in names and row["pass"] == passes
            and (tuple(row["shape"]), row["dtype"]) == (shape, dtype)
        ]  # fmt: skip

    cells = ("mingru_scan vanilla", "mingru_scan positive")
    found = [
        ("linear_scan forward, against torch.add", ratios("scan", ["linear_scan"], PASSES[0]), "≤ 1.2"),
        ("linear_scan forward + backward, against streaming", ratios("scan", ["linear_scan"], PASSES[1]), "≤ 1.5"),
        ("minGRU cell forward, against torch.add", ratios("cell", cells, PASSES[0]), "≤ 3"),
        ("minGRU-pytorch's core, against the minGRU cell", ratios("core", ["minGRU-pytorch core"], PASSES[0]), "≥ 60"),
        (
            "training step, against its model with a product for the recurrence",
            ratios("step", ["hf_recurrent minGRU"], "training step", (8, 256)),
            "≤ 1.12",
        ),
        *(
            (
                f"training step of {name}, against its model with a product for the recurrence",
                ratios("families", [name], "training step", (8, 256)),
                asked,
            )
            for name, asked in FAMILY_GOALS.items()
        ),
    ]
    rows = [[what, f"{number(max(values))} ×", asked] for what, values, asked in found if values]
    memory = {row["name"]: row["mebibytes"] for row in results if row["section"] == "memory"}
    if len(memory) == 2:
        ours, theirs = memory["hf_recurrent minGRU"], memory["minGRU-pytorch minLM"]
        rows.append(["peak memory of a training step, against minGRU-pytorch's", f"{ours / theirs:.2f} ×", "< 1"])
    for row in results:
        if row["section"] == "length" and row["name"] == "linear_scan":
            rows.append(["linear_scan's time grows with length to the power", f"{row['exponent']:.2f}", "1 ± 0.05"])
    return rows


def markdown(document: dict) -> str:
    """All tables of one measurement, as text."""
    results = document["results"]
    lines = [
        f"{conditions(document['machine'])}, `{document['command']}`.",
        "Medians of paired runs; in brackets the quartiles.",
    ]
    if not document["quick"] and (rows := headlines(results)):
        lines += ["", *table(["what", "measured", "asked for"], rows)]
    for section, title in TITLES.items():
        rows = [row for row in results if row["section"] == section]
        if not rows:
            continue
        lines += ["", f"### {title}", "", f"Ratio to {LIMITS[section]}."]
        for case in dict.fromkeys(map(case_name, rows)):
            of_case = [row for row in rows if case_name(row) == case]
            lines += ["", f"**{case}**", ""]
            lines += table(
                ["", "ms", "ratio", *(["error"] if "error" in of_case[0] else [])],
                [
                    [
                        row["name"],
                        number(row["milliseconds"]),
                        "{} [{}, {}]".format(*map(number, (row["ratio"], *row["ratio_quartiles"]))),
                        *([f"{row['error']:.0e}"] if "error" in row else []),
                    ]
                    for row in of_case
                ],
            )
    if any("error" in row for row in results):
        lines += ["", "Error: the largest deviation from the loop in float64, relative to the largest value."]
    if rows := [row for row in results if row["section"] == "memory"]:
        lines += ["", "### Peak memory of a training step above the process before it", ""]
        lines += table(["", "MiB"], [[row["name"], f"{row['mebibytes']:.0f}"] for row in rows])
    if rows := [row for row in results if row["section"] == "length"]:
        lengths = rows[0]["lengths"]
        lines += ["", f"### Time over length L, shape (1, L, {rows[0]['channels']})", ""]
        header = ["", *map(str, lengths), "exponent"]
        body = [[r["name"], *(number(x) for x in r["milliseconds"]), f"{r['exponent']:.3f}"] for r in rows]
        lines += [
            *table(header, body),
            "",
            "Milliseconds; the exponent e of time ~ length^e, by least squares of the logs.",
        ]
    for name, reason in document["not_measured"].items():
        lines += ["", f"Not measured: {name}: {reason}"]
    return "\n".join(lines) + "\n"


def save(document: dict, folder: Path) -> None:
    """scan.json (everything), scan.md (the tables), scan.png (the picture)."""
    write_whole(folder / "scan.json", json.dumps(document, indent=1) + "\n")
    write_whole(folder / "scan.md", markdown(document))
    if any(row["section"] != "memory" for row in document["results"]):
        with replacing(folder / "scan.png") as path:
            draw(document, path)


def draw(document: dict, path: str) -> None:
    """One panel of bars for each kind of work, the ratio to the limit; and time over length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = document["results"]
    barred = [row for row in results if row["section"] in ("scan", "cell", "step", "families")]
    kinds = dict.fromkeys((row["section"], row["pass"]) for row in barred)
    panels = [[row for row in barred if (row["section"], row["pass"]) == kind] for kind in kinds]
    lengths = [row for row in results if row["section"] == "length"]
    total = len(panels) + bool(lengths)
    columns = min(2, total)
    lines = -(-total // columns)
    size = (7.5 * columns, 4.6 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[total:]:
        axis.set_visible(False)
    for axis, rows in zip(axes.flat, panels, strict=False):
        _draw_ratios(axis, rows)
    if lengths:
        _draw_lengths(axes.flat[total - 1], lengths)
    figure.suptitle(conditions(document["machine"]))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_ratios(axis, rows: list[dict]) -> None:
    section, passes = rows[0]["section"], rows[0]["pass"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    cases = list(dict.fromkeys((tuple(row["shape"]), row["dtype"]) for row in rows))
    height = 0.8 / len(cases)
    for k, (case, colour) in enumerate(zip(cases, COLOURS, strict=False)):
        of_case = [row for row in rows if (tuple(row["shape"]), row["dtype"]) == case]
        where = [names.index(row["name"]) + (k - (len(cases) - 1) / 2) * height for row in of_case]
        values = [row["ratio"] for row in of_case]
        bars = axis.barh(where, values, height * 0.92, color=colour, label="{} {}".format(*case))
        axis.bar_label(bars, [number(value) for value in values], padding=3, fontsize=8)
    axis.axvline(1, color="black", linewidth=1, linestyle="--", zorder=0)
    if passes == "training step":
        axis.set_title(f"{TITLES[section]}, batch {cases[0][0]}")
    else:
        axis.set_title(f"{TITLES[section]}: {passes}")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlim(right=axis.get_xlim()[1] * 1.6)
        axis.legend(fontsize=8, frameon=False, loc="upper right")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel(f"time / time of {LIMITS[section]}\n(shorter is better, 1 is the limit)")
    axis.invert_yaxis()


def _draw_lengths(axis, rows: list[dict]) -> None:
    for row, colour in zip(rows, ("black", *COLOURS), strict=False):
        label = f"{row['name']}: ~ L^{row['exponent']:.2f}"
        axis.loglog(row["lengths"], row["milliseconds"], marker="o", markersize=4, color=colour, label=label)
    axis.set_xticks(rows[0]["lengths"], [str(length) for length in rows[0]["lengths"]])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(title=f"Time over length L, shape (1, L, {rows[0]['channels']})", xlabel="L", ylabel="milliseconds")
    axis.legend(fontsize=8, frameon=False, loc="upper left")
