"""Folders that appear under their name whole or not at all."""

import os

import pytest

from hf_recurrent.files import replacing_folder


@pytest.fixture(params=["model", "before"])
def folder(request, tmp_path):
    path = tmp_path / request.param
    path.mkdir()
    (path / "weights").write_text("old")
    return path


def replace(folder):
    with replacing_folder(folder) as temporary:
        (temporary / "weights").write_text("new")


def left(folder):
    """What the folder's file holds, and what lies beside the folder."""
    return (folder / "weights").read_text(), [path.name for path in folder.parent.iterdir() if path != folder]


def test_a_folder_takes_the_place_of_another(folder):
    replace(folder)
    assert left(folder) == ("new", [])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_an_interrupt_loses_no_folder(folder, monkeypatch, error, renamed):
    """It comes as soon as so many folders have been renamed."""
    rename, calls = os.rename, []

    def interrupted(*paths):
        if renamed:
            rename(*paths)
        calls.append(paths)
        if len(calls) == max(renamed, 1):
            raise error

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(error):
        replace(folder)
    assert left(folder) == ("new" if renamed == 2 else "old", [])


def test_a_second_interrupt_loses_no_folder(folder, monkeypatch):
    """While the earlier folder is put back."""
    rename = os.rename

    def interrupted(source, dest):
        if source == folder:
            rename(source, dest)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace(folder)
    [holder] = folder.parent.iterdir()
    assert sorted(path.read_text() for path in holder.rglob("weights")) == ["new", "old"]


def test_what_fails_inside_leaves_the_folder(folder):
    with pytest.raises(ValueError), replacing_folder(folder):
        raise ValueError
    assert left(folder) == ("old", [])
