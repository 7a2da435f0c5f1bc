"""A model from the Hub into a folder, whole or not at all."""

import hashlib
import json
import shutil
from pathlib import Path

from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open

from .refusals import HubError, check_repo_id, explained
from .staging import check_destination, new_folder

# Formats that run code when they are read, or that this package does not read.
LEFT = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.pkl",
    "*.pickle",
    "*.npy",
    "*.npz",
    "*.msgpack",
    "*.h5",
    "*.onnx",
    "*.ot",
)
LEFT += ("*.gguf", "*.tflite", "*.tar", "*.tar.gz", "*.zip")


def pull(
    repo_id: str,
    folder: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    token: str | None = None,
) -> str:
    """
    Download a repository's files, compare them with the checksums that the Hub gives, and put them into a folder: it
    appears when all of them are there, and wherever that fails there is what was there before.

    Args:
        repo_id: user/repo.
        folder: is made; one with a model in it is replaced with `overwrite`.
        revision: a branch, tag or commit; "main" by default.
        token: by default the one that `hf auth login` or HF_TOKEN has given, if any.

    Returns:
        The commit that was downloaded.

    Raises:
        ValueError: not the name of a repository; the repository holds no whole model in safetensors.
        FileExistsError: the folder cannot be used.
        HubError: the Hub cannot be reached, or refuses. The message is one line and holds no token.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    check_destination(folder, overwrite)
    api = HfApi(token=token)
    left = f"there is nothing new in {folder}"
    with new_folder(folder, overwrite) as new:
        with explained(repo_id, revision, left):
            info = api.model_info(repo_id, revision=revision, files_metadata=True)
            api.snapshot_download(repo_id, revision=info.sha, local_dir=new, ignore_patterns=list(LEFT))
        shutil.rmtree(new / ".cache", ignore_errors=True)
        for file in info.siblings:
            expected, path = file.lfs and file.lfs.sha256, new / file.rfilename
            if expected is not None and path.is_file() and _sha256(path) != expected:
                raise HubError(f"{repo_id}: {file.rfilename} is not what the Hub says it is (its checksum); {left}")
        check_whole(new, repo_id)
    return info.sha


def check_whole(folder: Path, repo_id: str) -> None:
    """
    Raises:
        ValueError: the folder lacks the configuration or weights of a model, or they are damaged.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{repo_id}: has no config.json, so it holds no model")
    index = folder / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if not shards:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{repo_id}: {index.name} is damaged") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{repo_id}: {index.name} names a file outside of its folder")
        if not (folder / shard).is_file():
            raise ValueError(f"{repo_id}: has no weights in {shard}")
        try:
            with safe_open(folder / shard, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{repo_id}: {shard} is not a whole safetensors file ({error})") from None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
