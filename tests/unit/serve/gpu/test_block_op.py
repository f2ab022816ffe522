"""The block-site operation keeps its place and its numbers in a compiled model. On CPU, through the same operation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from preft.errors import EngineError
from preft.serve.backend.decoder_layers import Residual
from preft.serve.backend.sites import install_block_site
from preft.serve.gpu import block_op
from preft.serve.gpu.block_op import BlockState, GraphBlockSite
from preft_kernels.rows import Segment
from preft_kernels.segments import EMPTY_PLAN, PlanBuffer, plan_rows
from preft_kernels.tables import BlockTables

WIDTH, LAYERS, SLOTS, TOKENS = 32, 3, 2, 12


class Layer(nn.Module):
    """A decoder layer that returns (hidden, residual), as most of vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden + residual
        return self.linear(self.norm(residual)), residual


class PlainLayer(Layer):
    """A decoder layer that returns the stream."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hidden + self.linear(self.norm(hidden))


class Decoder(nn.Module):
    """Layers one after the other; what a layer returns is read by the next and by the end."""

    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, residual = tokens * 1.5, torch.zeros_like(tokens)
        for layer in self.layers:
            output = layer(hidden, residual)
            hidden, residual = output if isinstance(output, tuple) else (output, residual)
        return hidden + residual


def fill(tables: list[BlockTables]) -> None:
    generator = torch.Generator().manual_seed(5)
    for table in tables:
        for slot in range(SLOTS):
            draw = torch.randn(2, 3 + slot, WIDTH, generator=generator) * 0.3
            table.set(slot, draw[0], torch.randn(3 + slot, generator=generator), draw[1])


@pytest.fixture(params=[Residual.SUM, Residual.PLAIN], ids=str)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Decoder, BlockState, list[BlockTables], Residual]]:
    torch.manual_seed(3)
    kind = Layer if request.param is Residual.SUM else PlainLayer
    decoder = Decoder(kind)
    state = BlockState(PlanBuffer(TOKENS, SLOTS, "cpu"))
    tables = [BlockTables.allocate(SLOTS, 8, WIDTH, torch.float32, "cpu") for _ in range(LAYERS)]
    fill(tables)
    for index, (layer, table) in enumerate(zip(decoder.layers, tables, strict=True)):
        site = GraphBlockSite(state, f"layers.{index}", table, request.param)
        install_block_site(layer, site)  # type: ignore[arg-type]
    yield decoder, state, tables, request.param
    state.is_closed = True


def by_hand(decoder: Decoder, tables: list[BlockTables], tokens: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The decoder with updates written out, row by row, in float64."""
    hidden, residual = tokens.double() * 1.5, torch.zeros_like(tokens).double()
    plain = type(decoder.layers[0]).__mro__[1]
    for layer, table in zip(decoder.layers, tables, strict=True):
        output = plain.forward(layer.double(), hidden, residual)  # type: ignore[attr-defined]
        hidden, residual = output if isinstance(output, tuple) else (output, residual)
        whole = hidden + residual
        for row, slot in enumerate(slots):
            if slot >= 0:
                rank = int(table.ranks[slot])
                down, up = table.down[slot, :rank].double(), table.up[slot, :rank].double()
                inner = whole[row] @ down.T + table.bias[slot, :rank].double()
                hidden[row] = hidden[row] + inner @ up
        layer.float()
    return hidden + residual


PLAN = [Segment(1, 4, 1), Segment(7, 3, 0)]
SLOTS_OF_ROWS = [-1, 1, 1, 1, 1, -1, -1, 0, 0, 0, -1, -1]


@torch.inference_mode()
def test_compiled_equals_by_hand(model: tuple[Decoder, BlockState, list[BlockTables], Residual]) -> None:
    decoder, state, tables, _ = model
    tokens = torch.randn(TOKENS, WIDTH)
    base = decoder(tokens)
    compiled = torch.compile(decoder, fullgraph=True)
    assert torch.allclose(compiled(tokens), base, atol=1e-5), "without adapters it is the base model"
    state.plan.upload(plan_rows(PLAN))
    state.launch = True
    wanted = by_hand(decoder, tables, tokens, SLOTS_OF_ROWS)
    assert (wanted - base).norm(dim=1)[torch.tensor(SLOTS_OF_ROWS) >= 0].min() > 0.1, "the adapters move nothing"
    state.num_calls = {}
    # The same compiled code, with another plan: nothing of the step is baked in.
    for run in (decoder, compiled):
        assert torch.allclose(run(tokens).double(), wanted, atol=1e-4)
    assert state.num_calls == {f"layers.{index}": 2 for index in range(LAYERS)}
    state.plan.upload(EMPTY_PLAN)
    assert torch.allclose(compiled(tokens), base, atol=1e-5)
    state.launch = False
    state.num_calls = {}
    assert torch.allclose(compiled(tokens), base, atol=1e-5)
    assert state.num_calls == {}, "a step without adapters launches nothing"


@torch.inference_mode()
def test_the_operation_says_what_it_changes(model: tuple[Decoder, BlockState, list[BlockTables], Residual]) -> None:
    _, state, _, _ = model
    state.plan.upload(plan_rows(PLAN))
    state.launch = True
    hidden, residual = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    for second in (residual, None):
        torch.library.opcheck(
            torch.ops.preft_gpu.block_site.default,
            (hidden.clone(), second, "layers.0"),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_three_dimensions(model: tuple[Decoder, BlockState, list[BlockTables], Residual]) -> None:
    _, state, _, _ = model
    state.plan.upload(plan_rows(PLAN))
    state.launch = True
    hidden = torch.randn(TOKENS, WIDTH)
    flat, deep = hidden.clone(), hidden.clone()[None]
    torch.ops.preft_gpu.block_site(flat, None, "layers.1")
    torch.ops.preft_gpu.block_site(deep, None, "layers.1")
    assert torch.equal(flat, deep[0])
    assert not torch.equal(flat, hidden)


def test_two_engines_cannot_share_names(model: tuple[Decoder, BlockState, list[BlockTables], Residual]) -> None:
    _, state, tables, _ = model
    other = BlockState(PlanBuffer(4, 1, "cpu"))
    with pytest.raises(EngineError, match="cannot share a process"):
        GraphBlockSite(other, "layers.0", tables[0], Residual.SUM)
    state.is_closed = True
    GraphBlockSite(other, "layers.0", tables[0], Residual.SUM)
    assert block_op._sites["layers.0"][0] is other
    other.is_closed = True
