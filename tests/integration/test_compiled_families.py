"""Every decoder class of the table, compiled: the engine answers as the oracles do. Half a minute each, so `--full`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engines import open_engine, save_all
from tests.helpers.families import FAMILIES, build_family, family_adapter
from tests.integration.test_decoder_classes import batch_of, build_oracle, decoder_class

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
