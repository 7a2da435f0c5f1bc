"""A folder with all that a repository of a model holds, made from a model or from the folder of one."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_recurrent

from ..files import UNFINISHED, existing, replacing_folder, saving
from ..training.model import check_folder, load_model, not_finite
from .code import add_to_json, module_name, standalone_image_processor, write_code

MAX_SHARD_SIZE = "5GB"
CODE = ("shim", "standalone")
# Beside the model: the tokenizer's files and the image processor's, copied as they are, and pictures for the card.
COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "loss.png",
)


def load(folder: str | Path, what: str = "DIR") -> PreTrainedModel:
    """The model in a folder, of the class that its configuration names, with its weights checked.

    Raises:
        ValueError: there is none, or it cannot be used; see `load_model`.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{what} {folder}: no such folder (hf-recurrent pull gets one from the Hub)")
    kinds = model_classes()
    name = architecture(check_folder(str(folder), what))
    if name not in kinds:
        raise ValueError(f"{what} {folder}: its config.json names the architecture {name}; known: {', '.join(kinds)}")
    return load_model(str(folder), what, kinds[name])


def model_classes() -> dict[str, type[PreTrainedModel]]:
    """Those of this package, by their names."""
    public = (getattr(hf_recurrent, name) for name in hf_recurrent.__all__)
    return {kind.__name__: kind for kind in public if isinstance(kind, type) and issubclass(kind, PreTrainedModel)}


def architecture(config: PreTrainedConfig) -> str:
    """The class of the model that a configuration was saved with; "none" where it names none."""
    return (config.architectures or ["none"])[0]


def stage(
    model: PreTrainedModel,
    folder: Path,
    *,
    source: Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    code: str = "shim",
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write weights (safetensors, in several files above `max_shard_size`), configurations, tokenizer and code.

    Args:
        folder: exists, and is empty.
        source: the folder that the model is from; its tokenizer's and image processor's files are copied.
        tokenizer: is saved in their place.
        code: "shim", to load the model where this package is installed, or "standalone", to load it anywhere.

    Raises:
        ValueError: an unknown `code`; weights that are not finite.
        OSError: the disk is full.
    """
    if code not in CODE:
        raise ValueError(f"code must be one of {', '.join(map(repr, CODE))}, got {code!r}")
    if broken := not_finite(model):
        raise ValueError(f"the model's weights are not finite: {', '.join(broken[:3])}")
    config_class = type(model.config)
    with saving(folder):
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if source is not None:
            for file in sorted({file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}):
                shutil.copyfile(file, folder / file.name)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_code(folder, config_class, code)
        processor = folder / "preprocessor_config.json"
        if processor.is_file():
            module = module_name(config_class)
            if code == "standalone":
                module = "image_processing_longhorn"
                (folder / f"{module}.py").write_text(standalone_image_processor(), encoding="utf-8")
            reference = f"{module}.{hf_recurrent.LonghornImageProcessor.__name__}"
            add_to_json(processor, auto_map={"AutoImageProcessor": {"pil": reference}})


@contextlib.contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """An empty temporary folder that takes the name `path` when the block ends without an error, in place of what was
    there.

    Raises:
        FileExistsError: something is there, and `overwrite` is not given; it is a file, a folder of other things
            than a model, or a training run's with its checkpoints.
        OSError: it cannot be written.
    """
    check_destination(path, overwrite)
    path = path.resolve()  # "." has no name, and once it is moved away, no relative path leads anywhere
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(path) as folder:
        yield folder


def check_destination(path: Path, overwrite: bool) -> None:
    """Refuse a destination before any work is done. Raises what `new_folder` raises."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path}: a file of that name is in the way")
    if path.is_symlink():
        raise FileExistsError(f"{path}: is a link; name the folder itself")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise FileExistsError(f"{path}: exists, and is not empty: replace it by --overwrite, or choose another")
        if not (path / "config.json").is_file():
            raise FileExistsError(f"{path}: holds no model, and is not replaced: choose another folder")
        if (path / "checkpoints").is_dir():
            raise FileExistsError(f"{path}: holds a training run's checkpoints, and is not replaced: choose another")
    try:
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=existing(path.absolute().parent)):
            pass
    except OSError as error:
        raise OSError(f"{path}: cannot be written to: {error.strerror or error}") from None
