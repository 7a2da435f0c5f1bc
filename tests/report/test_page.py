"""A report's page as a file, whatever is in it."""

import re
from urllib.parse import unquote

import pytest

from hf_recurrent.report import page
from hf_recurrent.report.page import Picture, Section, Table, write_page


def picture(name, color):
    return Picture(name, name, lambda figure: figure.set_facecolor(color), (1, 1))


def test_markdown_shows_names_as_they_are(tmp_path):
    output = tmp_path / "my tables (1) 50%.md"
    table = Table(["a &lt; b"], [["~~c~~ $d$ | e"]])
    write_page([Section("A & B", ["&amp;", table, picture("a", "red")])], output)
    text = output.read_text()
    for shown in (r"# A \& B", r"\&amp;", r"| a \&lt; b |", r"| \~\~c\~\~ \$d\$ \| e |"):
        assert f"{shown}\n" in text
    (link,) = re.findall(r"\]\((.*)\)", text)
    assert not any(character in link for character in " ()") and (tmp_path / unquote(link)).is_file()


@pytest.mark.parametrize("failing", ["drawing", "the page", "the pictures"])
def test_a_page_and_its_pictures_are_replaced_together(tmp_path, monkeypatch, failing):
    output, shown = tmp_path / "page.md", tmp_path / "page-pictures" / "a.png"
    write_page([Section("Before", [picture("a", "red")])], output)
    before = output.read_bytes(), shown.read_bytes()
    second = Section("After", [picture("a", "blue")])
    if failing == "drawing":
        second.parts.append(Picture("b", "b", lambda figure: 1 / 0))
    name = {"the page": "_markdown", "the pictures": "replacing_folder"}.get(failing)

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        if name:
            patched.setattr(page, name, fail)
        with pytest.raises((OSError, ZeroDivisionError)):
            write_page([second], output)
    assert (output.read_bytes(), shown.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page-pictures", "page.md"]
    write_page([Section("After", [picture("a", "blue")])], output)
    assert output.read_bytes() != before[0] and shown.read_bytes() != before[1]
