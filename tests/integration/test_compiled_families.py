"""Every decoder class of the table, compiled: the engine answers as the oracles do. Half a minute each, so `--full`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engines import open_engine, save_all
from tests.helpers.families import FAMILIES, build_family, family_adapter
from tests.integration.test_decoder_classes import batch_of, build_oracle, decoder_class, vllm_model

pytestmark = [pytest.mark.engine, pytest.mark.full]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_compiled_family_equals_both_oracles(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    base = build_family(family, tmp_path / "model")
    adapters = {
        "lorap": family_adapter(base, family, seed=1, linear=True),
        "direftp": family_adapter(base, family, seed=2, blocks=True),
        "all": family_adapter(base, family, seed=4, blocks=True, positions="all"),
    }
    oracle = build_oracle(base, adapters)
    batch = batch_of(adapters, [None, *adapters])
    oracle.require_adapters_matter(batch)

    with open_engine(base, save_all(tmp_path / "adapters", adapters), slots=3, compiled=True) as engine:
        assert decoder_class(engine) == family.decoder_layer
        assert engine.status()[0]["canary"]["deviation"] is not None
        oracle.require_equal(batch, engine.generate(batch))


def test_a_later_start_loads_what_the_first_has_kept(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not, where the table of sites is another: a graph holds their numbers."""
    from preft.serve.backend import compiled_cache

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    adapters = {"p": family_adapter(tiny_llama, FAMILIES["llama"], seed=1, linear=True, blocks=True)}
    paths = save_all(tmp_path / "adapters", adapters)
    oracle = build_oracle(tiny_llama, adapters)
    batch = batch_of(adapters, [None, "p"])
    right_path = compiled_cache._path

    def another_path(module: Any, infos: Any) -> Path:
        return right_path(module, infos[:-1])

    loaded = []
    for path in (right_path, right_path, another_path):
        monkeypatch.setattr(compiled_cache, "_path", path)
        with open_engine(tiny_llama, paths, compiled=True) as engine:
            loaded.append(
                [
                    module.was_aot_compile_fn_loaded_from_disk
                    for module in vllm_model(engine).modules()
                    if hasattr(module, "was_aot_compile_fn_loaded_from_disk")
                ]
            )
            oracle.require_equal(batch, engine.generate(batch))

    assert loaded == [[False], [True], [False]]
