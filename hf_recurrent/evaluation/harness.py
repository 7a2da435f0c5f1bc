"""lm-eval's tasks with the models of this package: finding tasks, running them, and going on after an interruption."""

import contextlib
import glob
import hashlib
import itertools
import json
import math
import os
import sqlite3
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import lm_eval
import sqlitedict
import torch
import yaml
from huggingface_hub import constants
from lm_eval.api.group import Group
from lm_eval.api.model import CacheHook
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from .. import __version__
from ..files import write_whole
from ..hub import access
from ..messages import first_line, nearest
from .lm import NO_LIMIT, RecurrentLM

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

TASKS = Path(__file__).with_name("lm_tasks")  # those of this package
FILE_FORMATS = ("json", "csv", "text", "parquet", "arrow")  # dataset paths that are no names on the Hub
BOOTSTRAP_ITERS = 1000  # for the standard errors that have no formula


def find_tasks(
    names: Sequence[str], include_paths: Sequence[str] = (), indexing: Callable[[], None] = lambda: None
) -> TaskManager:
    """
    Args:
        names: of tasks, groups or tags, or patterns of such names with * and ?.
        include_paths: folders of task files; like every task file of lm-eval, they may name Python functions to run.
        indexing: is called before all tasks of lm-eval are read, which takes seconds. It is not done where the names
            and what they consist of are all in `include_paths` and this package.

    Raises:
        ValueError: no names; no such folder; a name that there is not.
    """
    if not names:
        raise ValueError("--tasks: expected the name of a task")
    for path in include_paths:
        if not Path(path).is_dir():
            raise ValueError(f"--include-path {path}: no such folder")
    folders = [TASKS, *include_paths]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if any(config is None for _, config in _leaves(manager, names)):
        indexing()
        manager = TaskManager(include_path=folders)
    for where, config in _leaves(manager, names):
        if config is None:
            name, known = where[-1], manager.all_tasks if len(where) == 1 else [*manager.task_index]
            within = "".join(f"group {group}: " for group in where[:-1])
            broken = "".join(f"; {file} cannot be read: {why}" for file, why in _broken(include_paths))
            raise ValueError(f"--tasks {within}{name}: no such task{nearest(name, known, 3)}{broken}")
    return manager


def _matching(manager: TaskManager, name: str) -> list[str]:
    """What a pattern stands for, or the name itself."""
    found = manager.match_tasks([name]) if name not in manager.task_index and set(name) & set("*?") else []
    return found or [name]


def _broken(folders: Sequence[str]) -> list[tuple[Path, str]]:
    """The task files that are no YAML, with the reasons: lm-eval passes over them."""
    found = []
    for file in sorted(file for folder in folders for file in Path(folder).rglob("*.yaml")):
        try:
            yaml.compose(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            found.append((file, first_line(error)))
    return found


def _leaves(
    manager: TaskManager, names: Sequence[str | dict], within: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], dict | None]]:
    """
    What the names stand for, groups and tags taken apart: for each task the groups around it and its name, and its
    configuration, None where there is no such task.

    Raises:
        ValueError: a group that contains itself.
    """
    leaves: list[tuple[tuple[str, ...], dict | None]] = []
    names = [names] if isinstance(names, str) else names
    if not within:
        names = [match for name in names for match in _matching(manager, name)]
    for name in names:
        if isinstance(name, dict):  # written out in a group; what it has not is in the task of that name
            inner = name.get("task")
            name = inner if "group" not in name and isinstance(inner, str) else name
            if isinstance(name, dict):
                leaves += _leaves(manager, inner or [], within)
                continue
        if name in within:
            raise ValueError(f"--tasks {within[0]}: the group {name} contains itself")
        entry, here = manager.task_index.get(name), (*within, name)
        if entry is None:
            leaves.append((here, None))
        elif entry.cfg is None:
            leaves += _leaves(manager, sorted(entry.tags), here)
        elif "group" in entry.cfg:
            leaves += _leaves(manager, entry.cfg["task"], here)
        else:
            leaves.append((here, entry.cfg))
    return leaves


def load_tasks(manager: TaskManager, names: Sequence[str]) -> list[Task | Group]:
    """The tasks and groups of these names, with their data.

    Raises:
        ValueError: their data is not there: which files were looked for; a task file that lm-eval cannot use.
    """
    paths = [str((config or {}).get("dataset_path", "json")) for _, config in _leaves(manager, names)]
    if any(path not in FILE_FORMATS and not Path(path).exists() for path in paths):
        access.why_unreachable()
    try:
        loaded = manager.load(list(dict.fromkeys(match for name in names for match in _matching(manager, name))))
    except Exception as error:  # datasets, the Hub and lm-eval raise their own
        raise ValueError(_why_not_loaded(error)) from error
    groups, members = loaded.get("groups", {}), set()
    for children in loaded.get("group_map", {}).values():
        members |= set(children)
    return [item for items in (groups, loaded["tasks"]) for name, item in items.items() if name not in members]


def _why_not_loaded(error: Exception) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    tasks = [frame.f_locals["self"] for frame in frames if isinstance(frame.f_locals.get("self"), Task)]
    if not tasks:
        return f"--tasks: {first_line(error)}"
    config = tasks[-1].config
    if any(frame.f_locals.get("choice") == "" for frame in frames):  # lm-eval looks at the first document's choices
        return f"task {config.task}: a choice is empty, there is nothing to predict"
    path, what = str(config.dataset_path), f"task {config.task}"
    files = (config.dataset_kwargs or {}).get("data_files") or {}
    files = files.values() if isinstance(files, dict) else [files]
    files = [name for part in files for name in ([part] if isinstance(part, str) else part)]
    if os.path.isabs(path) or path.startswith("."):
        files = [path, *files]
    missing = [
        name for name in files if "://" not in name and not (Path(name).exists() or glob.glob(name, recursive=True))
    ]
    if missing:
        return f"{what}: its data is not there: looked for {', '.join(missing)}"
    if all(frame.f_code.co_name != "download" for frame in frames):
        return f"{what}: lm-eval cannot use its file: {_said(error)}"
    if files or path in FILE_FORMATS or Path(path).exists():
        said = (
            "there is nothing in it" if isinstance(error, StopIteration) else access.reason(error, path) or _said(error)
        )
        return f"{what}: its data{''.join(f' {name}' for name in files)} cannot be loaded: {said}"
    looked = (
        Path(datasets.config.HF_DATASETS_CACHE, path.replace("/", "___")),
        Path(constants.HF_HUB_CACHE, f"datasets--{path.replace('/', '--')}"),
    )
    reason = access.reason(error, path)
    return f"{what}: its dataset {path} cannot be loaded: {reason}; looked for {looked[0]}, {looked[1]}"


def _said(error: Exception) -> str:
    """What a KeyError or the like says is not enough without its kind."""
    kind = "" if isinstance(error, (ValueError, OSError, AssertionError)) else f"{type(error).__name__}: "
    return kind + first_line(error) if str(error) else type(error).__name__


def _check_choices(tasks: Sequence[Task | Group], limit: float | None) -> None:
    """lm-eval looks at the first document's choices alone, and what is put before a choice hides that it is empty.

    Raises:
        ValueError: one is, in a document that is evaluated; a task file from which there are none.
    """
    for task in (one for item in tasks for one in (item.get_all_tasks() if isinstance(item, Group) else [item])):
        # With several contexts, the choices stand in these.
        if getattr(task.config, "output_type", None) != "multiple_choice" or getattr(task, "multiple_input", 0):
            continue
        documents = task.eval_docs
        number = len(documents) if limit is None else math.ceil(len(documents) * limit) if limit < 1 else int(limit)
        for index, document in enumerate(itertools.islice(documents, number)):
            where = f"document {index} of task {task.config.task}"
            try:
                choices = task.doc_to_choice(document)
            except Exception as error:  # whatever a template or a function raises
                raise ValueError(f"{where}: its choices cannot be told: {_said(error)}") from error
            if isinstance(choices, (list, tuple)) and "" in choices:
                raise ValueError(f"{where}: choice {choices.index('')} is empty, there is nothing to predict")


def fingerprint(lm: RecurrentLM) -> str:
    """Equal for models and settings whose results are the same."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in lm.model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    backend = getattr(lm.tokenizer, "backend_tokenizer", None)
    digest.update((repr(lm.tokenizer) if backend is None else backend.to_str()).encode())
    settings = (lm.max_length, lm.add_bos_token, lm.prefix_token_id, lm.softmax_dtype, lm.mixed_precision_dtype)
    digest.update(repr((settings, lm.config.to_dict(), lm_eval.__version__, __version__)).encode())
    return digest.hexdigest()


def evaluate(
    lm: RecurrentLM,
    tasks: Sequence[Task | Group],
    num_fewshot: int | None = None,
    limit: float | None = None,
    output: Path | None = None,
    name: str | None = None,
) -> dict:
    """
    Runs tasks, and writes lm-eval's results to `output`/lm-eval.json, whole or not at all.

    Every result is kept in a file of lm-eval's cache in `output` as soon as it is there: if the run is interrupted, the
    same call goes on. The file is named after the model and the settings, and goes when the run is through; those of
    other models stay. (It is read with pickle: like a program, take none from a stranger.)

    Args:
        tasks: from `load_tasks`.
        num_fewshot: examples before each question, by default those of the task.
        limit: documents of each task, or below 1 the part of them.
        output: a folder that exists.
        name: the model's, for tables.

    Returns:
        lm-eval's results, with `name` as results["config"]["model"].

    Raises:
        ValueError: what lm-eval or the model refuses; what an interrupted run has kept cannot be read; another
            evaluation writes to `output`.
    """
    _check_choices(tasks, limit)
    with contextlib.nullcontext() if output is None else _alone_in(output):
        return _evaluate(lm, tasks, num_fewshot, limit, output, name)


@contextlib.contextmanager
def _alone_in(folder: Path):
    """Two evaluations in one folder would take away each other's files. A lock ends with its process."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"{folder}: another evaluation is writing there; wait for it or take another folder") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def _evaluate(
    lm: RecurrentLM,
    tasks: Sequence[Task | Group],
    num_fewshot: int | None,
    limit: float | None,
    output: Path | None,
    name: str | None,
) -> dict:
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # a fork of a process with threads may hang
    cache = None if output is None else str(output / f".lm-eval-{fingerprint(lm)}")
    if cache is not None:
        for file in output.glob(f"{Path(cache).name}_rank*.db"):
            _check_kept(file)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            results = lm_eval.simple_evaluate(
                lm, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, use_cache=cache, log_samples=False,
                batch_size=lm.batch_size, bootstrap_iters=BOOTSTRAP_ITERS,
                task_manager=TaskManager(include_defaults=False),
            )  # fmt: skip
    except ValueError as error:
        if "larger than population" in str(error):
            shots = "num_fewshot of its file" if num_fewshot is None else f"--num-fewshot {num_fewshot}"
            raise ValueError(f"{shots}: a task has fewer examples to choose from") from error
        raise
    except Exception as error:  # what task files make of documents, in templates, functions and filters
        of_model = any(frame.f_locals.get("self") is lm for frame, _ in traceback.walk_tb(error.__traceback__))
        if of_model and not isinstance(error, (AssertionError, LookupError, TypeError, ArithmeticError)):
            raise
        raise ValueError(f"lm-eval: {_said(error)}") from error
    finally:
        if lm.cache_hook.dbdict is not None:
            lm.cache_hook.dbdict.close()  # waits until everything is written
            lm.set_cache_hook(CacheHook(None))
    results["config"]["model"] = name or lm.config.name_or_path
    results["hf_recurrent_version"] = __version__
    if lm.max_length == NO_LIMIT:
        results["max_length"] = None
    if output is not None:
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        write_whole(output / "lm-eval.json", text + "\n")
        for file in output.glob(f"{Path(cache).name}_rank*.db"):
            file.unlink()
    return results


def _check_kept(file: Path) -> None:
    """sqlitedict reports a damaged file from a thread of its own, in many lines."""
    try:
        with contextlib.closing(sqlite3.connect(file)) as database:
            (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'unnamed'").fetchone():
                for _, value in database.execute("SELECT key, value FROM unnamed"):
                    sqlitedict.decode(value)  # as lm-eval does
    except Exception as error:  # pickle raises of all kinds
        state = first_line(error)
    if state != "ok":
        raise ValueError(f"{file}: what an interrupted evaluation has kept cannot be read ({state}): remove it")
