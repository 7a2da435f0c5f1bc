"""What is built, what it declares, and the files that a new user meets first."""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hf_recurrent
from hf_recurrent.training.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
# Imported name -> distribution, where the two differ.
DISTRIBUTIONS = {"PIL": "pillow", "cuda": "cuda-core", "lm_eval": "lm-eval", "yaml": "pyyaml"}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution and the wheel that was built from it."""
    source, output = tmp_path_factory.mktemp("source") / "hf_recurrent", tmp_path_factory.mktemp("built")
    ignore = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return output


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def requirements(metadata) -> list[Requirement]:
    return [Requirement(text) for text in metadata.get_all("Requires-Dist")]


def package_files() -> set[str]:
    """The files of the package as they lie in the checkout."""
    found = (path for path in (ROOT / "hf_recurrent").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(ROOT).as_posix() for path in found}


def dist_info(wheel: Path) -> str:
    return wheel.name.split("-py3")[0] + ".dist-info"


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    assert {name.split("/")[0] for name in names} == {"hf_recurrent", dist_info(wheel)}
    assert {name for name in names if name.startswith("hf_recurrent/")} == package_files()
    assert {Path(name).suffix for name in names if "/csrc/" in name} >= {".h", ".cpp"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_metadata(wheel, metadata):
    assert (metadata["Name"], metadata["Version"]) == ("hf-recurrent", hf_recurrent.__version__)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.10")
    assert set(metadata.get_all("Provides-Extra")) == {"cuda", "dev", "eval", "examples"}
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "hf-recurrent = hf_recurrent.cli:main" in archive.read(name).decode()


def test_installed_wheel_works_away_from_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True)
    assert {path.name for path in target.iterdir()} == {
        "bin",
        "hf_recurrent",
        f"{wheel.name.split('-py3')[0]}.dist-info",
    }
    # The CPU kernels are compiled from the sources that the wheel brought.
    program = (
        "import torch, hf_recurrent; from hf_recurrent.scan import linear_scan, backend_report;"
        "h, _ = linear_scan(torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1));"
        "print(hf_recurrent.__file__); print(h.flatten().tolist()); print(backend_report()['cpu'])"
    )
    environment = os.environ | {"PYTHONPATH": str(target), "HF_RECURRENT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    where, values, cpu = done.stdout.splitlines()
    assert Path(where).is_relative_to(target)
    assert values == "[1.0, 1.5, 1.75]"
    assert cpu == "available" or not any(map(shutil.which, ("c++", "g++", "clang++")))


def test_source_distribution_carries_what_the_make_targets_need(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
    names = {member.name.split("/", 1)[1] for member in members if member.isfile()}
    needed = {
        "Makefile",
        "LICENSE",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
        "examples/recipes/stdlib_mingru.yaml",
    }
    assert names >= package_files() | needed | {"tests/test_packaging.py", "benchmarks/scan.py"}
    assert not [member.name for member in members if member.issym()]
    assert not [name for name in names if name.startswith((".", "runs/")) or "__pycache__" in name]


def test_every_import_of_the_package_is_declared(requirements):
    declared = {canonicalize_name(r.name) for r in requirements if r.marker is None}
    extras = ("cuda", "eval")
    optional = {canonicalize_name(r.name) for r in requirements if any(name in str(r.marker) for name in extras)}
    imported = set()
    for path in (ROOT / "hf_recurrent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    third_party = imported - set(sys.stdlib_module_names) - {"hf_recurrent"}
    needed = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in third_party}
    assert needed - optional <= declared
    assert declared - needed == set(), "declared, but imported nowhere"


def test_constraints_pin_one_allowed_version_of_every_requirement(requirements):
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), line
            if pin.marker is None or pin.marker.evaluate():
                assert canonicalize_name(pin.name) not in pins, f"{pin.name} is pinned twice"
                pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    free = {"cuda-bindings", "nvidia-cuda-nvrtc"}  # PyTorch's CUDA builds choose these
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name not in free:
            assert requirement.specifier.contains(pins[name]), requirement
    assert not free & set(pins)


def test_links_at_the_top_lead_into_the_package():
    if not (ROOT / ".git").exists():
        pytest.skip("links are part of the repository, not of the source distribution")
    for name in ("modeling", "conversion"):
        assert os.readlink(ROOT / name) == f"hf_recurrent/{name}"
        assert (ROOT / name / "__init__.py").is_file()


def run_make(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(MAKE is None, reason="make is not installed")
def test_make_lists_its_targets():
    targets = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    done = run_make()
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")] == targets


@pytest.mark.skipif(MAKE is None, reason="make is not installed")
def test_make_leaves_no_stamp_when_the_environment_cannot_be_made(tmp_path):
    venv = tmp_path / "venv"
    for python in ("false", str(tmp_path / "no-such-python")):
        done = run_make("test", f"VENV={venv}", f"PYTHON={python}")
        assert done.returncode != 0
        assert "Python 3.10 or later is needed" in done.stderr
        assert not list(tmp_path.rglob(".installed*")) + list(tmp_path.rglob(".made"))


def test_readme_names_only_what_exists():
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", readme, re.MULTILINE))
    assert {"demo", "test", "test-hf"} <= named <= set(targets)
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / link).exists(), link


def test_readme_quotes_the_committed_measurement():
    results = ROOT / "benchmarks" / "results" / "scan.md"
    if not results.exists():
        pytest.skip("no measurement is committed yet")
    table = re.search(r"^\| what \|.*?\n\n", results.read_text(), re.MULTILINE | re.DOTALL).group()
    assert table.strip() in (ROOT / "README.md").read_text()


def test_readme_example_loads_and_generates(tmp_path, capsys):
    readme = (ROOT / "README.md").read_text()
    example = re.search(r"```python\n(import hf_recurrent .*?)```", readme, re.DOTALL).group(1)
    tokenizer = byte_tokenizer()
    config = hf_recurrent.MinGRUConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1)
    hf_recurrent.MinGRUForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert sum(line != "" for line in example.splitlines()) == 5
    exec(example.replace("runs/demo", str(tmp_path)), {})
    assert capsys.readouterr().out.startswith("def ")
