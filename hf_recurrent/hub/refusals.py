"""What can go wrong between here and the Hub, each in one line that says what to do, without any token."""

import contextlib
from collections.abc import Iterator

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ..messages import first_line
from .secrets import redacted

LOGIN = "log in by `hf auth login`, or set HF_TOKEN"


class HubError(OSError):
    """A transfer that failed; the message is one line and holds no token."""


def check_repo_id(repo_id: str) -> None:
    """
    Raises:
        ValueError: it is not user/repo.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        reason = redacted(first_line(error)).rstrip(".")
        raise ValueError(f"{redacted(repo_id)}: is not the name of a repository, user/repo ({reason})") from None
    if repo_id.count("/") != 1:
        raise ValueError(f"{redacted(repo_id)}: expected the name of a repository as user/repo")


@contextlib.contextmanager
def explained(repo_id: str, revision: str | None = None, what: str = "") -> Iterator[None]:
    """Turns whatever the Hub's client raises into one HubError that names the repository.

    Args:
        what: was to be done: "nothing was pushed".
    """
    try:
        yield
    except HubError:
        raise
    except Exception as error:  # the HTTP client has kinds of its own, which are not part of the Hub's interface
        if isinstance(error, OSError) and not isinstance(error, (HfHubHTTPError, *_NOT_THE_DISK)):
            raise  # the disk's: it names a file
        reason = _reason(error, repo_id, revision)
        if reason is None:
            raise
        # Not chained: the HTTP client's messages hold addresses with signatures.
        raise HubError(redacted(f"{repo_id}: {reason}{what and f'; {what}'}")) from None


_NOT_THE_DISK = (LocalTokenNotFoundError, OfflineModeIsEnabled, EntryNotFoundError, ConnectionError)


def _reason(error: Exception, repo_id: str, revision: str | None) -> str | None:
    while isinstance(error, (LocalEntryNotFoundError, RuntimeError)) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # they say no more than that nothing is in the cache either, or which file it was
    where = f"{constants.ENDPOINT}/{repo_id}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError):
        return f"there is no token; {LOGIN}"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the Hub is not asked"
    if isinstance(error, GatedRepoError):
        return f"is gated: ask for access at {where}" + ("" if get_token() else f", then {LOGIN}")
    if isinstance(error, RevisionNotFoundError):
        return f"has no revision {revision or constants.DEFAULT_REVISION}"
    if isinstance(error, RepositoryNotFoundError):
        hidden = "it is hidden from your token" if get_token() else f"it is private: {LOGIN}"
        return f"there is no such repository at {constants.ENDPOINT}, or {hidden}"
    if isinstance(error, EntryNotFoundError):
        return "a file of the repository is missing on the Hub"
    if status == 401:
        return f"the Hub refuses the token; {LOGIN}" if get_token() else f"there is no token; {LOGIN}"
    if status == 403:
        return "the token may not do this: it needs write access to the repository"
    if status == 409:
        return "the repository has changed meanwhile, or another commit is under way: try again"
    if status is not None and status >= 500:
        return f"the Hub answered {status}: try again later"
    if isinstance(error, (BadRequestError, HfHubHTTPError)):
        return f"the Hub refused: {first_line(error)}"
    if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "hf_xet"):
        return f"{constants.ENDPOINT} cannot be reached, or the connection was cut ({first_line(error)})"
    if isinstance(error, ConnectionError):
        return f"the connection was cut ({first_line(error)})"
    if isinstance(error, (OSError, EntryNotFoundError)):
        return first_line(error)
    return None
