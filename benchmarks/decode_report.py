"""The tables and the picture of decode.py's measurements; both are made from the results alone."""

import json
from pathlib import Path

from hf_recurrent.files import replacing, write_whole
from report import COLOURS, conditions, number, table

TOKEN_GOAL, POSITION_GOAL, PREFILL_TIME_GOAL, PREFILL_MEMORY_GOAL = 1.25, 1.05, 1.1, 0.1


def headlines(sections: dict[str, dict]) -> list[list[str]]:
    """What was asked for beside what was measured, the worst of the families: rows of [what, measured, asked for]."""
    rows = {name: section["results"] for name, section in sections.items()}
    found = []
    for dtype in ("float32", "bfloat16"):
        ours = [row for row in rows.get("token", []) if row["ours"] and row["dtype"] == dtype]
        if ours:
            worst = max(ours, key=lambda row: row["ratio"])
            what = f"a decoded token against its bare linear layers, {dtype}, worst family ({worst['name']})"
            found.append([what, f"{worst['ratio']:.2f} ×", f"≤ {TOKEN_GOAL}"])
    if positions := rows.get("position"):
        worst = max(row["ratio"] for row in positions)
        found.append(["a token at position 1,000,000 against position 100, 125M", f"{worst:.3f} ×", "≤ 1.05"])
    if streams := [row for row in rows.get("stream", []) if row["name"] != "attention"]:
        worst = max(row["ratio"] for row in streams)
        found.append(
            [f"the same after a stream of {streams[0]['to']:,} tokens, small model", f"{worst:.3f} ×", "≤ 1.05"]
        )
        equal = all(len(set(row["cache_bytes"].values())) == 1 for row in streams)
        found.append(
            ["cache bytes at 10, 10,000 and all tokens of the stream", "equal" if equal else "differ", "equal"]
        )
        growth = max(row["growth_bytes_per_token"] for row in streams)
        found.append(["resident memory of the stream, growth per token", f"{growth:.2f} bytes", "0"])
    if prefills := rows.get("prefill"):
        slowest, largest = max(row["ratio"] for row in prefills), max(row["memory_ratio"] for row in prefills)
        tokens = prefills[0]["tokens"]
        found.append([f"prefill of {tokens:,} tokens in chunks against one call, time", f"{slowest:.2f} ×", "≤ 1.1"])
        found.append(["the same, peak memory", f"{largest:.3f} ×", "≤ 0.1"])
    return found


def crossing(rows: list[dict]) -> str:
    """From which context on the attention model's token takes longer."""
    slower = [row for row in rows if row["ratio"] > 1]
    if not slower:
        return f"not slower up to {rows[-1]['context']}"
    index = rows.index(slower[0])
    if index == 0:
        return f"slower at all contexts from {rows[0]['context']} on"
    before, after = rows[index - 1], rows[index]
    share = (1 - before["ratio"]) / (after["ratio"] - before["ratio"])
    return f"slower from a context of about {before['context'] + share * (after['context'] - before['context']):.0f} on"


def _token(rows: list[dict]) -> list[str]:
    header = ["", "dtype", "parameters", "bare linear layers, ms", "token, ms", "ratio", "weights, GB/s"]
    return table(
        header,
        [
            [
                row["name"], row["dtype"], f"{row['parameters'] / 1e6:.0f}M", f"{row['linear_milliseconds']:.2f}",
                f"{row['milliseconds']:.2f}",
                "{:.2f} [{:.2f}, {:.2f}]".format(row["ratio"], *row["ratio_quartiles"]),
                f"{row['linear_gigabytes_per_second'] * row['linear_milliseconds'] / row['milliseconds']:.1f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def _generate(rows: list[dict]) -> list[str]:
    return table(
        ["", "dtype", "tokens", "generate, ms per token", "ratio to the model's calls", "generate itself, ms"],
        [
            [
                row["name"], row["dtype"], str(row["tokens"]), f"{row['milliseconds_per_token']:.2f}",
                "{:.3f} [{:.3f}, {:.3f}]".format(row["ratio"], *row["ratio_quartiles"]),
                f"{row['added_milliseconds_per_token']:.2f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def _position(rows: list[dict]) -> list[str]:
    return table(
        ["", "token at 1,000,000, ms", "ratio to position 100"],
        [
            [
                row["name"],
                f"{row['milliseconds']:.2f}",
                "{:.3f} [{:.3f}, {:.3f}]".format(row["ratio"], *row["ratio_quartiles"]),
            ]
            for row in rows
        ],
    )


def _stream(rows: list[dict]) -> list[str]:
    lines = table(
        ["", "parameters", "cache bytes", "resident growth, bytes per token", "last token / token 100"],
        [
            [
                row["name"], f"{row['parameters'] / 1e3:.0f}k",
                ", ".join(f"{count:,} at {int(at):,}" for at, count in row["cache_bytes"].items()),
                f"{row['growth_bytes_per_token']:.2f}", f"{row['ratio']:.3f}",
            ]
            for row in rows
            if row["name"] != "attention"
        ],
    )  # fmt: skip
    for row in rows:
        if row["name"] == "attention":
            at, held = list(row["cache_bytes"].items())[-1]
            lines += [
                "",
                f"A Llama of {row['parameters'] / 1e3:.0f}k parameters, of the same width and depth: its key-value "
                f"cache takes {held:,} bytes at {int(at):,} tokens ({row['computed_bytes_per_token']} a token), "
                f"{row['resident_bytes'][-1] / 2**20:.0f} MiB of resident memory.",
            ]
    return lines


def _crossing(rows: list[dict]) -> list[str]:
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of = [row for row in rows if row["dtype"] == dtype]
        ours, theirs = (f"{count / 1e6:.0f}M" for count in of[0]["parameters"])
        lines += [
            f"**{dtype}**: minGRU ({ours}) against Transformers' Llama ({theirs}), which is {crossing(of)}; "
            f"{of[-1]['ratio']:.1f} × as slow at {of[-1]['context']}.",
            "",
            *table(
                ["context", "Llama, ms", "minGRU, ms", "ratio", "key-value cache, MiB"],
                [
                    [
                        str(row["context"]), f"{row['milliseconds']:.1f}", f"{row['ours_milliseconds']:.1f}",
                        f"{row['ratio']:.2f}", f"{row['cache_bytes'] / 2**20:.0f}",
                    ]
                    for row in of
                ],
            ),
            "",
        ]  # fmt: skip
    return lines[:-1]


def _prefill(rows: list[dict]) -> list[str]:
    return table(
        ["", "one call, s", "chunks, s", "ratio", "one call, MiB", "chunks, MiB", "ratio"],
        [
            [
                row["name"], f"{row['whole_seconds']:.2f}", f"{row['chunks_seconds']:.2f}", f"{row['ratio']:.2f}",
                f"{row['whole_mebibytes']:.0f}", f"{row['chunks_mebibytes']:.0f}", f"{row['memory_ratio']:.3f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


TITLES = {
    "token": ("A decoded token, batch 1", _token),
    "generate": ("What `generate` adds", _generate),
    "position": ("A decoded token late in a text", _position),
    "stream": ("A stream of a million tokens", _stream),
    "crossing": ("Against attention, over the context", _crossing),
    "prefill": ("Prefill in chunks", _prefill),
}


def markdown(document: dict) -> str:
    """All tables of one measurement, as text."""
    sections, lines = document["sections"], ["Medians of paired runs; in brackets the quartiles."]
    quick = any(section["quick"] for section in sections.values())
    if not quick and (rows := headlines(sections)):
        lines += ["", *table(["what", "measured", "asked for"], rows)]
    for name, section in sections.items():
        if section["results"]:
            title, rows_of = TITLES[name]
            lines += ["", f"### {title}", "", f"{conditions(section['machine'])}, `{section['command']}`.", ""]
            lines += rows_of(section["results"])
    for name, reason in document["not_measured"].items():
        lines += ["", f"Not measured: {name}: {reason}"]
    return "\n".join(lines) + "\n"


def save(document: dict, folder: Path) -> None:
    """decode.json (everything), decode.md (the tables), decode.png (the picture)."""
    write_whole(folder / "decode.json", json.dumps(document, indent=1) + "\n")
    write_whole(folder / "decode.md", markdown(document))
    with replacing(folder / "decode.png") as path:
        draw(document, path)


def draw(document: dict, path: str) -> None:
    """One panel for each section that has a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = {"token": _draw_token, "crossing": _draw_crossing, "stream": _draw_stream, "prefill": _draw_prefill}
    sections = document["sections"]
    chosen = [name for name in panels if name in sections and sections[name]["results"]]
    columns = 2 if len(chosen) > 1 else 1
    lines = max(1, -(-len(chosen) // columns))
    size = (7.5 * columns, 4.6 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(chosen) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, chosen, strict=False):
        panels[name](axis, sections[name]["results"])
    if chosen:
        figure.suptitle(conditions(sections[chosen[0]]["machine"]))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_token(axis, rows: list[dict]) -> None:
    names = list(dict.fromkeys(row["name"] for row in rows))
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    height = 0.8 / len(dtypes)
    for k, (dtype, colour) in enumerate(zip(dtypes, COLOURS, strict=False)):
        of = [row for row in rows if row["dtype"] == dtype]
        where = [names.index(row["name"]) + (k - (len(dtypes) - 1) / 2) * height for row in of]
        bars = axis.barh(where, [row["ratio"] for row in of], height * 0.92, color=colour, label=dtype)
        axis.bar_label(bars, [number(row["ratio"]) for row in of], padding=3, fontsize=8)
    axis.axvline(1, color="black", linewidth=1, linestyle="--", zorder=0)
    axis.axvline(TOKEN_GOAL, color="black", linewidth=1, linestyle=":", zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xticks([1, 2, 5, 10])
    axis.set_xlim(
        left=min(0.9, 0.8 * min(row["ratio"] for row in rows)), right=max(row["ratio"] for row in rows) * 1.25
    )
    axis.set(
        title="A decoded token, batch 1", xlabel="time / time of the model's bare linear layers (dotted: asked for)"
    )
    axis.legend(fontsize=8, frameon=False, loc="upper right")
    axis.invert_yaxis()


def _draw_crossing(axis, rows: list[dict]) -> None:
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    for dtype, ours, theirs in zip(dtypes, COLOURS[:2], COLOURS[2:], strict=False):
        of = [row for row in rows if row["dtype"] == dtype]
        contexts = [row["context"] for row in of]
        axis.loglog(contexts, [row["ours_milliseconds"] for row in of], "o-", color=ours, label=f"minGRU, {dtype}")
        axis.loglog(contexts, [row["milliseconds"] for row in of], "s-", color=theirs, label=f"Llama, {dtype}")
    axis.set_xticks(contexts, [str(context) for context in contexts])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_yticks([10, 20, 50, 100, 200, 500, 1000])
    low = min(min(row["milliseconds"], row["ours_milliseconds"]) for row in rows)
    axis.set_ylim(low / 1.5, max(row["milliseconds"] for row in rows) * 1.5)
    axis.set(title="A decoded token over the context", xlabel="tokens before it", ylabel="milliseconds")
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def _draw_stream(axis, rows: list[dict]) -> None:
    for row, colour in zip(rows, (*COLOURS, "#5a8f4e", "black"), strict=False):
        label = row["name"] if row["name"] != "attention" else "Llama's key-value cache"
        axis.loglog(row["tokens"], [max(x, 2**16) / 2**20 for x in row["resident_bytes"]], color=colour, label=label)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(
        title="Memory of a stream", xlabel="tokens read", ylabel="MiB of resident memory beyond the model",
    )  # fmt: skip
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def _draw_prefill(axis, rows: list[dict]) -> None:
    names = [row["name"] for row in rows]
    for k, (kind, goal, colour) in enumerate(
        (("ratio", PREFILL_TIME_GOAL, COLOURS[0]), ("memory_ratio", PREFILL_MEMORY_GOAL, COLOURS[2]))
    ):
        where = [index + (k - 0.5) * 0.4 for index in range(len(rows))]
        label = "time" if kind == "ratio" else "peak memory"
        bars = axis.barh(where, [row[kind] for row in rows], 0.37, color=colour, label=label)
        axis.bar_label(
            bars, [f"{row[kind]:.2f}" if k == 0 else f"{row[kind]:.3f}" for row in rows], padding=3, fontsize=8
        )
        axis.axvline(goal, color=colour, linewidth=1, linestyle=":", zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlim(right=max(1.35, *(row["ratio"] * 1.2 for row in rows)))
    axis.set(
        title=f"Prefill of {rows[0]['tokens']:,} tokens in chunks of {rows[0]['chunk']:,}",
        xlabel="relative to one call (dotted: asked for)",
    )
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    axis.invert_yaxis()
