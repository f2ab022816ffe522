"""A run's adapter to a repository on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from preft.adapters.manifest import MANIFEST_NAME, TENSORS_NAME
from preft.errors import FileError

PUSHED = (MANIFEST_NAME, TENSORS_NAME, "README.md", "curves.png")
"""Files that go to the hub; checkpoints, metrics and the command line stay here."""


def push_adapter(folder: Path, repository: str, *, private: bool = True, endpoint: str | None = None) -> str:
    """Uploads an adapter in one commit; the repository is made if there is none.

    Args:
        folder: Of a finished run.
        repository: `NAME` or `ORG/NAME`.
        private: Of a repository that is made.
        endpoint: Of another hub; None for the one that `HF_ENDPOINT` names.

    Returns:
        Address of the commit.

    Raises:
        FileError: It cannot be pushed; the adapter stays where it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api = HfApi(endpoint=endpoint)
    try:
        name = api.create_repo(repository, private=private, exist_ok=True).repo_id
        made = api.upload_folder(
            repo_id=name, folder_path=folder, allow_patterns=list(PUSHED), commit_message="Adapter trained by preft"
        )
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError, ValueError) as error:
        raise FileError(
            f"The adapter cannot be pushed to `{repository}`",
            got=" ".join(str(error).split())[:200] or type(error).__name__,
            hint=f"it lies in `{folder}`; log in with `hf auth login`, then `hf upload {repository} {folder} .` "
            f"--include {' --include '.join(PUSHED)}",
        ) from None
    return str(made.commit_url)
