"""Reading a base model's configuration: what Transformers ships, and never code that lies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from preft.errors import FileError


def read_base_config(folder: Path) -> Any:
    """The Transformers configuration of a checkpoint folder.

    Raises:
        FileError: `config.json` is missing, cannot be understood, or is inconsistent.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileError(
            "The base model's configuration cannot be read",
            got=f"`{folder}`: {reason[:200]}",
            accepted="a folder with a Hugging Face `config.json` of a model that Transformers ships",
        ) from None
