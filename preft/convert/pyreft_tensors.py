"""From the tensors of one pyreft intervention to a low-rank update `h + up(down(h) + bias)`.

Every intervention here is such an update exactly; only its matrices are named and stored in many ways. An orthogonal
one is stored as reflectors and a base under torch's parametrisation, or as the finished matrix. It is materialised in
float64 and rounded once.

Source: stanfordnlp/pyreft `pyreft/interventions.py`, release 0.1.0; torch `nn/utils/parametrizations.py`,
`_Orthogonal.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from preft.convert.pyreft_config import Intervention, InterventionKind
from preft.convert.weights import read_pickle, require_numbers
from preft.errors import AdapterError, BaseMismatchError, FileError, UnsupportedError

if TYPE_CHECKING:
    import torch

_ROTATION = "rotate_layer.parametrizations.weight."
_SIZES = ("embed_dim", "interchange_dim")
_ORTHOGONAL = (
    InterventionKind.DIREFT,
    InterventionKind.LOREFT,
    InterventionKind.CONSREFT,
    InterventionKind.LOBIREFT,
)


@dataclass(frozen=True)
class Update:
    """The numbers of one intervention.

    Attributes:
        down: [R, D].
        up: [D, R].
        bias: [R], or None.
        is_computed: Whether a matrix was worked out, so that its exact value is not one of the file's numbers.
        source_dtype: Type of the learned source, in which pyreft itself computes.
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None
    is_computed: bool
    source_dtype: str


def read_update(intervention: Intervention, hidden_size: int, base: str) -> Update:
    """Reads one intervention's file.

    Args:
        intervention: Which.
        hidden_size: Width of the base's residual stream.
        base: The base's name, for errors.

    Raises:
        FileError: The file cannot be read.
        AdapterError: It is damaged, holds other tensors than its class has, or they do not agree.
        BaseMismatchError: It was made for another width.
        UnsupportedError: The orthogonal matrix is square, which pyreft stores in another way.
    """
    tensors = _read(intervention)
    parts = _Parts(intervention, tensors, hidden_size, base)
    update = _update(intervention.kind, parts)
    parts.require_all_used()
    if intervention.rank not in (None, update.down.shape[0]):
        raise AdapterError(
            f"`{intervention.file.name}` has another rank than the configuration says",
            got=f"rank {update.down.shape[0]}",
            accepted=f"`low_rank_dimension` {intervention.rank}",
        )
    return update


def _read(intervention: Intervention) -> dict[str, torch.Tensor]:
    path = intervention.file
    try:
        return read_pickle(path)
    except OSError as error:
        raise FileError(f"`{path}` cannot be read", got=error.strerror or str(error)) from None
    except AdapterError as error:
        raise AdapterError(
            error.what, got=error.got, accepted=error.accepted, hint="write it again with `ReftModel.save`"
        ) from None


def _update(kind: InterventionKind, parts: _Parts) -> Update:
    """The update of each class; `up` [D, R] is the transposed rotation or projection."""
    import torch

    up, is_computed = parts.rotation() if kind in _ORTHOGONAL else (parts.projection(), False)
    rank = up.shape[1]
    if kind in (InterventionKind.CONSREFT, InterventionKind.LOBIREFT):
        constant = parts.vector("learned_source", rank)
        down = -up.T if kind is InterventionKind.CONSREFT else torch.zeros_like(up.T)
        return Update(down, up, constant, is_computed, _name(constant))
    down = parts.matrix(("learned_source.weight", "weight"), rank)
    bias = parts.optional_vector(("learned_source.bias", "bias"), rank)
    source_dtype = _name(down)
    offset = parts.optional_vector(("proj_layer.bias",), rank)
    if kind in (InterventionKind.LOREFT, InterventionKind.NOREFT):
        down, is_computed = down.double() - up.double().T, True
    if kind is InterventionKind.NOREFT and offset is not None:
        bias = -offset.double() if bias is None else bias.double() - offset.double()
    return Update(down, up, bias, is_computed, source_dtype)


def orthogonal_matrix(original: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """The matrix [D, R] that torch's Householder parametrisation stands for, in float64.

    Its diagonal is cut to integers, as torch does. Under weight decay the stored ones shrink to 0.99..., which is cut
    to 0: then the matrix is zero, in pyreft as here.

    Args:
        original: [D, R] reflectors below the diagonal, signs on it.
        base: [D, D], or None.
    """
    import torch

    values = original.double()
    reflectors = values.tril(-1)
    tau = 2.0 / (1.0 + (reflectors * reflectors).sum(0))
    product: torch.Tensor = torch.linalg.householder_product(reflectors, tau) * values.diagonal().trunc()
    return product if base is None else base.double() @ product


class _Parts:
    """The tensors of one file, taken out one by one."""

    def __init__(
        self, intervention: Intervention, tensors: dict[str, torch.Tensor], hidden_size: int, base: str
    ) -> None:
        self._file = intervention.file.name
        self._kind = intervention.kind
        self._width = hidden_size
        self._base = base
        for name in _SIZES:
            size = tensors.pop(name, None)
            if size is not None and (size.numel() != 1 or int(size) != hidden_size):
                raise self._other_width(f"`{name}` {size.flatten()[:4].tolist()}")
        for name, tensor in tensors.items():
            require_numbers(f"{self._file}: {name}", tensor)
        self._left = tensors

    def rotation(self) -> tuple[torch.Tensor, bool]:
        """The orthogonal matrix [D, R], and whether it was worked out here."""
        original = self._left.pop(f"{_ROTATION}original", None)
        if original is None:
            return self.matrix(("rotate_layer", "rotate_layer.weight"), None, transposed=True), False
        base = self._left.pop(f"{_ROTATION}0.base", None)
        self._require_shape(f"{_ROTATION}original", original, (self._width, None))
        if base is not None:
            self._require_shape(f"{_ROTATION}0.base", base, (self._width, self._width))
        if original.shape[1] >= self._width:
            raise UnsupportedError(
                f"`{self._file}` has an orthogonal matrix of full rank, which is not stored as reflectors",
                got=f"rank {original.shape[1]} of {self._width}",
                accepted="a rank below the width of the base",
            )
        return orthogonal_matrix(original, base), True

    def projection(self) -> torch.Tensor:
        """The free matrix, as [D, R]."""
        return self.matrix(("proj_layer.weight",), None).T.contiguous()

    def matrix(self, names: tuple[str, ...], rank: int | None, *, transposed: bool = False) -> torch.Tensor:
        """A [R, D] matrix, or [D, R] if `transposed`."""
        name = next((name for name in names if name in self._left), None)
        if name is None:
            raise AdapterError(
                f"`{self._file}` has no `{names[0]}`, which a {self._kind.value} has",
                got=", ".join(f"`{found}`" for found in list(self._left)[:6]) or "no tensors",
            )
        tensor = self._left.pop(name)
        self._require_shape(name, tensor, (self._width, rank) if transposed else (rank, self._width))
        return tensor

    def vector(self, name: str, rank: int) -> torch.Tensor:
        """A vector [R] that must be there."""
        found = self.optional_vector((name,), rank)
        if found is None:
            raise AdapterError(f"`{self._file}` has no `{name}`, which a {self._kind.value} has")
        return found

    def optional_vector(self, names: tuple[str, ...], rank: int) -> torch.Tensor | None:
        """A vector [R], or None if it is not there."""
        name = next((name for name in names if name in self._left), None)
        if name is None:
            return None
        tensor = self._left.pop(name)
        if tuple(tensor.shape) != (rank,):
            raise AdapterError(
                f"`{self._file}`: `{name}` has the wrong shape", got=str(tuple(tensor.shape)), accepted=str((rank,))
            )
        return tensor

    def require_all_used(self) -> None:
        """Refuses a tensor that the class does not have."""
        if self._left:
            raise AdapterError(
                f"`{self._file}` holds tensors that a {self._kind.value} has not",
                got=", ".join(f"`{name}`" for name in list(self._left)[:4]),
            )

    def _require_shape(self, name: str, tensor: torch.Tensor, shape: tuple[int | None, int | None]) -> None:
        found = tuple(tensor.shape)
        if len(found) != 2 or 0 in found:
            raise AdapterError(f"`{self._file}`: `{name}` is not a matrix", got=f"shape {found}")
        for size, expected in zip(found, shape, strict=True):
            if expected == self._width and size != expected:
                raise self._other_width(f"`{name}` of shape {found}")
            if expected is not None and size != expected:
                raise AdapterError(f"`{self._file}`: `{name}` has another rank than its partner", got=f"shape {found}")

    def _other_width(self, got: str) -> BaseMismatchError:
        return BaseMismatchError(
            "The checkpoint was made for a base of another width",
            got=f"{got} in `{self._file}`",
            accepted=f"{self._width}, as `{self._base}` has",
            hint="name the base that it was trained on: `--base MODEL`",
        )


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
