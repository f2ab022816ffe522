"""What a compiled engine refuses at start, and what happens to compilations that are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from preft.errors import EngineError, UnsupportedError, UsageError
from preft.serve.settings import EngineSettings

pytest.importorskip("vllm")


def config_of(**changed: Any) -> Any:
    """What vLLM leaves of its configuration on a CPU with LoRA."""
    from vllm.config import CompilationMode

    values = {
        "enforce_eager": False,
        "ranks": 1,
        "backend": "inductor",
        "custom_ops": ["none"],
        "mode": CompilationMode.NONE,
        **changed,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=values["enforce_eager"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=values["ranks"]),
        compilation_config=SimpleNamespace(
            backend=values["backend"], custom_ops=values["custom_ops"], mode=values["mode"]
        ),
    )


def test_the_mode_is_set_back_and_nothing_else() -> None:
    from vllm.config import CompilationMode

    from preft.serve.backend.compiled import restore_compilation

    config = config_of()
    restore_compilation(config)

    assert config == config_of(mode=CompilationMode.DYNAMO_TRACE_ONCE)


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"enforce_eager": True}, UnsupportedError, "compile and to run eager"),
        ({"ranks": 2}, UnsupportedError, "not tested yet"),
        ({"backend": "eager"}, EngineError, "not those that preft compiles with"),
        ({"custom_ops": ["all"]}, EngineError, "not those that preft compiles with"),
        ({"mode": 3}, EngineError, "not those that preft compiles with"),
    ],
)
def test_what_cannot_be_compiled_is_refused(changed: dict[str, Any], error: type[Exception], told: str) -> None:
    from preft.serve.backend.compiled import restore_compilation

    config = config_of(**changed)
    with pytest.raises(error, match=told):
        restore_compilation(config)
    assert config == config_of(**changed)


def test_a_missing_compiler_is_refused() -> None:
    from torch._inductor import config

    from preft.serve.backend.compiled import restore_compilation

    restore_compilation(config_of())
    # Its own way to change it: a monkeypatch of the nested section is not undone.
    with config.patch({"cpp.cxx": ("/nowhere/g++",)}), pytest.raises(UnsupportedError, match=r"no C\+\+ compiler"):
        restore_compilation(config_of())
    restore_compilation(config_of())


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="compile and to run eager"):
        EngineSettings(compiled=True, vllm={"enforce_eager": True})
    assert EngineSettings(vllm={"enforce_eager": True}).compiled is False


def test_a_model_that_vllm_does_not_compile_is_refused() -> None:
    from preft.serve.backend.compiled import require_compiled

    with pytest.raises(UnsupportedError, match="does not compile `Linear`"):
        require_compiled(nn.Linear(2, 2))


class Compilable(nn.Module):
    """As vLLM's wrapped models look to the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.do_not_compile = False
        self.was_aot_compile_fn_loaded_from_disk = False
        self.aot_compiled_fn: Any = None

    def aot_compile(self) -> None:
        raise AssertionError("not called here")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from preft.serve.backend import compiled_cache

    path = tmp_path / "folder" / "preft-0"
    monkeypatch.setattr(compiled_cache, "_path", lambda *_arguments: path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "untouched")
    return path


def test_a_damaged_compilation_is_made_anew(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    from preft.serve.backend import compiled_cache

    model = Compilable()
    assert compiled_cache.load(model, ()) == 0
    assert not caplog.records
    kept.parent.mkdir()
    kept.write_bytes(b"not a compilation")

    assert compiled_cache.load(model, ()) == 0
    assert model.aot_compiled_fn is None
    assert "made anew" in caplog.text


def test_what_cannot_be_kept_costs_nothing_but_the_next_start(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    from preft.serve.backend import compiled_cache

    saved: list[str] = []
    model = Compilable()
    model.aot_compiled_fn = SimpleNamespace(save_compiled_function=saved.append)
    compiled_cache.keep(model, ())
    assert saved == [str(kept)]

    model.was_aot_compile_fn_loaded_from_disk = True
    compiled_cache.keep(model, ())
    assert saved == [str(kept)]

    def fail(_path: str) -> None:
        raise OSError("disk full")

    model.was_aot_compile_fn_loaded_from_disk = False
    model.aot_compiled_fn = SimpleNamespace(save_compiled_function=fail)
    compiled_cache.keep(model, ())
    assert "disk full" in caplog.text


def test_an_eager_model_has_nothing_to_keep(kept: Path) -> None:
    from preft.serve.backend import compiled_cache

    model = Compilable()
    model.do_not_compile = True
    kept.parent.mkdir()
    kept.write_bytes(b"not a compilation")

    assert compiled_cache.load(model, ()) == 0
    compiled_cache.keep(model, ())
    assert model.aot_compiled_fn is None
