"""A model to the Hub, with its card and the code to load it, in one commit."""

import tempfile
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .card import MARK, model_card
from .refusals import LOGIN, HubError, check_repo_id, explained
from .staging import MAX_SHARD_SIZE, load, stage

# What an earlier push may have left that this one does not write: the weights in other files, another code.
REPLACED = ("*.safetensors", "*.safetensors.index.json", "modeling_*.py", "image_processing_*.py")
CARD = "README.md"


def push_model(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    source: str | Path | None = None,
    code: str = "shim",
    license: str | None = None,
    language: list[str] | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload a model of hf_recurrent",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    token: str | None = None,
) -> str:
    """
    Make the repository if there is none, and upload weights, configurations, tokenizer, card and code in one commit:
    until it is done, and wherever it fails, the repository has what it had.

    Args:
        repo_id: user/repo.
        tokenizer: goes with the model.
        source: the folder that the model is from, whose tokenizer's files go with it, and whose card: a README.md
            there, or else what `hf-recurrent train` left to tell of the run.
        code: "shim", to load the model where this package is installed, or "standalone", to load it anywhere.
        license, language: for the card; by default those that the run's settings name.
        private: of a new repository.
        revision: a branch, made if there is none; "main" by default.
        max_shard_size: weights above it go into several files.
        token: by default the one that `hf auth login` or HF_TOKEN has given.

    A README.md in the repository that is not one of these cards stays as it is.

    Returns:
        The address of the commit.

    Raises:
        ValueError: not the name of a repository; weights that are not finite.
        HubError: the Hub cannot be reached, or refuses. The message is one line and holds no token.
    """
    check_repo_id(repo_id)
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{repo_id}: HF_HUB_OFFLINE is set, so the Hub is not asked; nothing was pushed")
    if token is None and get_token() is None:
        raise HubError(f"{repo_id}: there is no token; {LOGIN}; nothing was pushed")
    api = HfApi(token=token)
    source = None if source is None else Path(source)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stage(model, folder, source=source, tokenizer=tokenizer, code=code, max_shard_size=max_shard_size)
        own = None if source is None else source / CARD
        if own is not None and own.is_file():
            card = ModelCard.load(own, ignore_metadata_errors=True)
        else:
            card = model_card(model, repo_id, source=source, code=code, license=license, language=language)
        (folder / CARD).write_text(str(card), encoding="utf-8")
        with explained(repo_id, revision, "nothing was pushed"):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            operations = _operations(api, repo_id, revision, folder)
            # One commit, where `upload_folder` may make several: nobody ever loads half of a model.
            commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
    return commit.commit_url


def push_folder(folder: str | Path, repo_id: str, **options) -> str:
    """Push the model in a folder, with what belongs to it; see `push_model`.

    Raises:
        What `push_model` raises; ValueError where there is no model that can be used.
    """
    check_repo_id(repo_id)
    return push_model(load(folder), repo_id, source=folder, **options)


def _operations(api: HfApi, repo_id: str, revision: str | None, folder: Path) -> list:
    """Additions of all files, and deletions of what they replace."""
    there = api.list_repo_files(repo_id, revision=revision)
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    if CARD in there:
        with tempfile.TemporaryDirectory() as temporary:
            card = api.hf_hub_download(repo_id, CARD, revision=revision, local_dir=temporary)
            if MARK not in Path(card).read_text(encoding="utf-8"):
                del files[CARD]
    stale = [name for name in there if name not in files and any(fnmatch(name, pattern) for pattern in REPLACED)]
    deletions = [CommitOperationDelete(path_in_repo=name) for name in stale]
    return deletions + [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()]
