"""A page of text, tables and pictures as HTML or Markdown. Nothing in it is fetched from elsewhere, and nothing that a
run says of itself is taken for markup."""

import base64
import html
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from ..files import replacing, replacing_folder, sync, write_whole

FORMATS = (".html", ".md")
STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68em; margin: 2em auto; padding: 0 1em; color: #222; }
h1, h2 { font-weight: 600; } h2 { margin-top: 2.2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .8em; text-align: left; border-bottom: 1px solid #e6e6e6; vertical-align: top; }
th { border-bottom: 1px solid #888; }
img { max-width: 100%; height: auto; display: block; margin: 1em 0; }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; font-size: 13px; }
.wide { overflow-x: auto; }
"""


@dataclass
class Table:
    columns: list[str]
    rows: list[list[str]]


@dataclass
class Picture:
    """`draw` draws on a matplotlib figure of `size` (inches); `name` is a file's, without ending."""

    name: str
    title: str
    draw: Callable
    size: tuple[float, float] = (8, 4.2)


@dataclass
class Code:
    lines: list[str]


@dataclass
class Section:
    title: str
    parts: list[str | Table | Picture | Code] = field(default_factory=list)


def write_page(sections: list[Section], output: Path) -> None:
    """
    Args:
        sections: the first one's title is the page's.
        output: ends in .html or .md. Pictures are inside the HTML; beside the Markdown they lie in a folder of its name
            and "-pictures", which is replaced.

    Raises:
        ValueError: another ending; that folder holds something else than pictures.
        OSError: it cannot be written; an earlier page is untouched.
    """
    output = Path(output)
    if output.suffix not in FORMATS:
        raise ValueError(f"{output}: expected a name ending in {' or '.join(FORMATS)}")
    if output.suffix == ".html":
        write_whole(output, _html(sections))
        return
    folder = output.with_name(f"{output.stem}-pictures")
    check_pictures(folder)
    drawn = {
        f"{part.name}.png": png(part) for section in sections for part in section.parts if isinstance(part, Picture)
    }
    with replacing(output) as page:
        page.write_text(_markdown(sections, folder.name), encoding="utf-8")
        sync(page)
        # Both are whole on the disk before either takes its name. What remains is the moment between the two: a page
        # that cannot be renamed then, or a crash, leaves the earlier page with the new pictures.
        if drawn:
            with replacing_folder(folder) as temporary:
                for name, data in drawn.items():
                    (temporary / name).write_bytes(data)


def check_pictures(folder: Path) -> None:
    """
    Raises:
        ValueError: there is a file of that name, or a folder with something else than pictures.
    """
    if folder.exists() and not (folder.is_dir() and all(file.suffix == ".png" for file in folder.iterdir())):
        raise ValueError(f"{folder}: holds something else than pictures, and is not replaced")


def png(picture: Picture) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=picture.size, layout="constrained")
    FigureCanvasAgg(figure)
    picture.draw(figure)
    stream = io.BytesIO()
    figure.savefig(stream, dpi=130, format="png", metadata={"Software": None})
    return stream.getvalue()


def _html(sections: list[Section]) -> str:
    body = []
    for number, section in enumerate(sections):
        level = 1 if number == 0 else 2
        body.append(f"<h{level}>{html.escape(section.title)}</h{level}>")
        body += [_html_part(part) for part in section.parts]
    title = html.escape(sections[0].title)
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>{title}</title>'
    content = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n<style>\n{STYLE}</style>\n{content}\n</html>\n'


def _html_part(part: str | Table | Picture | Code) -> str:
    if isinstance(part, str):
        return f"<p>{html.escape(part)}</p>"
    if isinstance(part, Code):
        return f"<pre>{html.escape(chr(10).join(part.lines))}</pre>"
    if isinstance(part, Picture):
        data, title = base64.b64encode(png(part)).decode(), html.escape(part.title)
        return f'<img alt="{title}" title="{title}" src="data:image/png;base64,{data}">'
    head = "".join(f"<th>{html.escape(name)}</th>" for name in part.columns)
    rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in part.rows]
    lines = "\n".join(f"<tr>{row}</tr>" for row in [head, *rows])
    return f'<div class="wide"><table>\n{lines}\n</table></div>'


def _markdown(sections: list[Section], folder: str) -> str:
    blocks = []
    for number, section in enumerate(sections):
        blocks.append(f"{'#' if number == 0 else '##'} {plain(section.title)}")
        for part in section.parts:
            if isinstance(part, str):
                blocks.append(plain(part))
            elif isinstance(part, Code):
                # A line of dots or dashes cannot close the block: what is in it is indented.
                blocks.append("\n".join(f"    {' '.join(line.split())}" for line in part.lines))
            elif isinstance(part, Picture):
                # A name with spaces, parentheses or a colon would not be read as a link's address.
                blocks.append(f"![{plain(part.title)}]({quote(os.fsencode(f'{folder}/{part.name}.png'))})")
            else:
                rows = [part.columns, ["---"] * len(part.columns), *part.rows]
                blocks.append("\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows))
    return "\n\n".join(blocks) + "\n"


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>&~$])", r"\\\1", " ".join(text.split()))


def _cell(text: str) -> str:
    return text if set(text) == {"-"} else plain(text).replace("|", "\\|")
