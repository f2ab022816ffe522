"""The pages' code runs: commands and Python in the order of the page, in one folder, on the embedded model.

A block that is not run says why in a comment above it. `preft serve` is started, waited for, and ended with its page or
by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import Block, blocks, blocks_of, pages

MODEL = "smollm2-135m-instruct"
READY_S, BLOCK_S = 240, 900
SERVE = re.compile(r"^(?:\S*/)?preft serve .*$", re.MULTILINE)
RUNNABLE = ("sh", "python")

WITH_BLOCKS = [page for page in pages() if any(b.language in RUNNABLE and not b.reason for b in blocks(page))]

pytestmark = [pytest.mark.full, pytest.mark.smollm2]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has before the first page: a base, a PEFT LoRA, converted adapters, rows of their own."""
    folder = tmp_path_factory.mktemp("stock")
    run_in(folder, f"preft models fetch {MODEL} smollm2 --quiet")
    script = (
        "import torch\nfrom peft import LoraConfig, get_peft_model\nfrom transformers import AutoModelForCausalLM\n"
        "torch.manual_seed(0)\nbase = AutoModelForCausalLM.from_pretrained('smollm2')\n"
        "config = LoraConfig(r=8, lora_alpha=16, target_modules=['q_proj', 'v_proj', 'down_proj'])\n"
        "lora = get_peft_model(base, config)\n"
        "for name, parameter in lora.named_parameters():\n"
        "    if 'lora_B' in name:\n        torch.nn.init.normal_(parameter, std=0.02)\n"
        "lora.save_pretrained('my-lora')\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, capture_output=True)
    for name in ("adapters/alice", "adapters/bob", "spare/my-lorap"):
        run_in(folder, f"preft convert my-lora {name} --base smollm2 --quiet")
    return folder


def run_in(folder: Path, script: str, *, limit: float = BLOCK_S) -> str:
    """Runs shell commands; a failing one is an error with everything it printed."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}"
    return done.stdout


class Page:
    """One page being run: its folder, and its server if one is up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> None:
        """Runs a block; a shell block's server stays up for those that follow."""
        if block.language == "python":
            done = subprocess.run(
                [sys.executable, "-c", block.text], cwd=self.folder, capture_output=True, text=True, timeout=BLOCK_S
            )
            assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            return
        text, place = block.text, 0
        for found in SERVE.finditer(text):
            self.shell(text[place : found.start()])
            self.serve(found[0])
            place = found.end()
        self.shell(text[place:])

    def shell(self, text: str) -> None:
        """Runs commands, in the folder where the ones before left off."""
        if not text.strip():
            return
        out = run_in(self.folder, f"{text}\nprintf '\\n@%s' \"$PWD\"")
        self.folder = Path(out.rsplit("\n@", 1)[1])

    def serve(self, line: str) -> None:
        """Starts a server and waits until it answers."""
        self.stop()
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        log = (self.folder / "server.log").open("w")
        self.server = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=self.folder, env=environment, stdout=log, stderr=log, text=True
        )
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            assert self.server.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=5)
                return
            time.sleep(1)
        raise AssertionError("the server did not get ready")

    def stop(self) -> None:
        """Ends the server, which must end well."""
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            status = self.server.wait(timeout=120)
            self.server = None
            assert status == 0


@pytest.fixture
def page(stock: Path, tmp_path: Path) -> Iterator[Any]:
    shutil.copytree(stock, tmp_path / "p", symlinks=True)
    made = Page(tmp_path / "p")
    try:
        yield made
        made.stop()
    finally:
        if made.server is not None:
            made.server.kill()


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_a_page_runs(page: Page, name: str) -> None:
    ran = [block for block in blocks(name) if block.language in RUNNABLE and block.reason is None]
    assert ran
    if not any("convert my-lora my-lorap" in block.text for block in ran):
        (page.folder / "spare" / "my-lorap").rename(page.folder / "my-lorap")
    for block in ran:
        page.run(block)


def test_a_failing_block_is_an_error(page: Page) -> None:
    shell, python = blocks_of("p", "```\npreft inspect nowhere\n```\n\n```python\n1 / 0\n```\n")
    with pytest.raises(AssertionError, match="nowhere"):
        page.run(shell)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        page.run(python)
