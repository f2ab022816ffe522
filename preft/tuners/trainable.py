"""New adapters on a Hugging Face model, to be trained: made so that training starts from the base model exactly.

The layers are those that serve a trained adapter (see `preft.tuners.attach`), so the rule that decides which tokens
are adapted is one and the same. Values are held in float32 whatever the model's number type.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from preft.adapters.adapter import Adapter, expected_shapes, tensor_prefix
from preft.adapters.fingerprint import BaseFingerprint
from preft.adapters.manifest import Manifest
from preft.config.train import METHODS
from preft.errors import AdapterError, UsageError
from preft.positions import ALL, PROMPT, Policy
from preft.tuners.attach import AttachedModel, attached
from preft.tuners.layers import GatedBlock, GatedLinear
from preft.tuners.sites import decoder_blocks, module_sizes
from preft.types import Site, SiteKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ORTHOGONAL_TOLERANCE = 1e-3
"""How far the columns of an orthogonal R may be from orthonormal, in float32 at any rank that fits a model."""


def new_adapter(
    model: PreTrainedModel,
    base: BaseFingerprint,
    method: str,
    rank: int,
    *,
    targets: Sequence[str] | None = None,
    layers: Collection[int] | None = None,
    alpha: float | None = None,
    orthogonal: bool = False,
    positions: Policy | None = None,
    seed: int = 0,
    name: str = "default",
) -> AttachedModel:
    """Puts a new adapter on a model, in use and trainable; everything else is frozen.

    The update starts at exactly zero: `up` of a linear site is zero, as is R of a free block site. Where R is
    orthogonal it cannot be zero, so W and the bias are.

    Args:
        model: A causal language model; changed in place.
        base: Its fingerprint, which the adapter will carry.
        method: One of `preft.config.train.METHODS`.
        rank: Of every site.
        targets: Last parts of the paths of the linear modules to adapt, such as `q_proj`; None for all of them in the
            decoder blocks but a mixture's experts and routers. Not for `direftp`.
        layers: Numbers of the decoder blocks to adapt, in or at the output of; None for all.
        alpha: Scale times rank, at linear sites; None for `2 * rank`.
        orthogonal: Keep the columns of every block site's `up` (R transposed) orthonormal.
        positions: Position policy; None for `prompt`, or `all` under `lora`.
        seed: Of the starting values.
        name: What to call the adapter on the model.

    Returns:
        The handle of the model's adapters.

    Raises:
        UsageError: The arguments do not go together, or name nothing in the model.
        AdapterError: A site cannot be adapted, or `base` is another architecture than the model's.
        UnsupportedError: The model cannot be adapted by position.
    """
    policy = method_policy(method, positions)
    if rank < 1:
        raise UsageError("The rank is not valid", got=str(rank), accepted="at least 1")
    if orthogonal and method not in ("direftp", "mixed"):
        raise UsageError(f"`orthogonal` says nothing under the method `{method}`", accepted="`direftp` or `mixed`")
    if targets is not None and method == "direftp":
        raise UsageError("`targets` names linear modules, and `direftp` adapts blocks", hint="use `layers`, or `mixed`")
    sites = planned_sites(model, method, rank, targets=targets, layers=layers, alpha=alpha)
    manifest = Manifest(positions=policy, dtype="float32", sites=sites, base=base)
    start = Adapter.build(manifest, _starting_values(manifest, seed, orthogonal=orthogonal))
    model.requires_grad_(False)
    handle = attached(model)
    handle.add(start, name=name, trainable=True)
    if orthogonal:
        for module in _block_updates(handle, name):
            parametrizations.orthogonal(module, "weight", "householder", use_trivialization=False)
    return handle


def planned_sites(
    model: PreTrainedModel,
    method: str,
    rank: int,
    *,
    targets: Sequence[str] | None = None,
    layers: Collection[int] | None = None,
    alpha: float | None = None,
) -> tuple[Site, ...]:
    """The sites that a new adapter would have; the arguments are those of `new_adapter`.

    Args:
        model: A causal language model; one without values will do.
        method: One of `preft.config.train.METHODS`.
        rank: Of every site.
        targets: Last parts of the paths of linear modules.
        layers: Numbers of decoder blocks.
        alpha: Scale times rank.

    Raises:
        UsageError: The arguments name nothing in the model.
        UnsupportedError: The model cannot be adapted by position.
    """
    scale = (2.0 * rank if alpha is None else alpha) / rank
    blocks = decoder_blocks(model)
    chosen = _chosen_blocks(list(blocks), layers)
    sites: list[Site] = []
    if method != "direftp":
        sites += _linear_sites(model, chosen, rank, scale, targets)
    if method in ("direftp", "mixed"):
        hidden = model.config.get_text_config().hidden_size
        sites += [Site(path, SiteKind.BLOCK, rank, hidden, hidden, 1.0, has_bias=True) for path in chosen]
    return tuple(sorted(sites, key=lambda site: (site.path, site.kind)))


def method_policy(method: str, positions: Policy | None = None) -> Policy:
    """The position policy of a method.

    Raises:
        UsageError: The method is unknown, or `positions` contradicts it.
    """
    if method not in METHODS:
        raise UsageError(f"Unknown method: `{method}`", accepted=", ".join(f"`{known}`" for known in METHODS))
    if positions is None:
        return ALL if method == "lora" else PROMPT
    if (method == "lora") == positions.is_prompt_only:
        raise UsageError(
            f"The positions `{positions}` contradict the method `{method}`",
            accepted="`all`" if method == "lora" else "`prompt` or `fN+lM`",
            hint="`lora` acts on every token, the other methods on prompt tokens only",
        )
    return positions


def trainable_parameters(handle: AttachedModel, name: str = "default") -> dict[str, nn.Parameter]:
    """The parameters of a trainable adapter by their path in the model; an optimiser wants `parameter_groups`."""
    _require_trainable(handle, name)
    inside = (f"lora_A.{name}.", f"lora_B.{name}.", f"preft_down.{name}.", f"preft_up.{name}.")
    return {
        path: parameter
        for path, parameter in handle.model.named_parameters()
        if any(part in f"{path}." for part in inside)
    }


def parameter_groups(
    handle: AttachedModel, name: str = "default", *, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for an optimiser: weight decay acts on free matrices only.

    Never on an orthogonal R: its parametrisation keeps signs of one in the diagonal of the stored matrix and reads
    them as integers. Any decay makes them 0.999..., which reads as 0, so that R becomes zero, the adapter moves
    nothing and every gradient vanishes, without an error.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for path, parameter in trainable_parameters(handle, name).items():
        is_free_matrix = parameter.dim() > 1 and ".parametrizations." not in path
        (decayed if is_free_matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adapter_state(handle: AttachedModel, name: str = "default") -> dict[str, torch.Tensor]:
    """Copies of a trainable adapter's parameters, as they are stored, for a checkpoint."""
    return {
        path: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for path, value in trainable_parameters(handle, name).items()
    }


def load_adapter_state(handle: AttachedModel, state: Mapping[str, torch.Tensor], name: str = "default") -> None:
    """Puts the parameters of a checkpoint back.

    Raises:
        AdapterError: They are not those of this adapter.
    """
    parameters = trainable_parameters(handle, name)
    differing = sorted(set(parameters) ^ set(state)) or [
        path for path, parameter in parameters.items() if parameter.shape != state[path].shape
    ]
    if differing:
        raise AdapterError(
            "The checkpoint's adapter is not the one being trained",
            got=f"{len(differing)} differing parameters, first `{differing[0]}`",
            hint="resume with the same method, rank, targets and layers",
        )
    with torch.no_grad():
        for path, parameter in parameters.items():
            parameter.copy_(state[path])


def extract_adapter(
    handle: AttachedModel,
    name: str = "default",
    *,
    dtype: torch.dtype = torch.float32,
    provenance: Mapping[str, Any] | None = None,
    chat_template_sha256: str | None = None,
) -> Adapter:
    """The adapter as it is now, on the CPU, ready to save and to serve.

    Args:
        handle: The model's adapters.
        name: Which one.
        dtype: Type of its tensors.
        provenance: Where it comes from; see `preft.provenance`.
        chat_template_sha256: Digest of the chat template that its examples were rendered with, or None.

    Raises:
        UsageError: No trainable adapter has this name.
        AdapterError: A value is not finite, or an orthogonal R is no longer orthogonal.
    """
    _require_trainable(handle, name)
    tensors: dict[str, torch.Tensor] = {}
    start = handle.adapters[name].manifest
    for site in start.sites:
        down, up = _modules(handle.model, site, name)
        prefix = tensor_prefix(site)
        _require_orthonormal(up, site)
        tensors[f"{prefix}.down"], tensors[f"{prefix}.up"] = down.weight, up.weight
        if site.has_bias:
            tensors[f"{prefix}.bias"] = down.bias
    tensors = {key: value.detach().to("cpu", dtype, copy=True).contiguous() for key, value in tensors.items()}
    manifest = replace(
        start,
        dtype=str(dtype).removeprefix("torch."),
        provenance=dict(provenance or {}),
        chat_template_sha256=chat_template_sha256,
        digest="",
    )
    return Adapter.build(manifest, tensors)


def _chosen_blocks(blocks: list[str], layers: Collection[int] | None) -> list[str]:
    outside = sorted(layer for layer in layers or () if not 0 <= layer < len(blocks))
    if outside or (layers is not None and not layers):
        raise UsageError(
            "`layers` names no block of the model",
            got=f"{outside[0]}" if outside else "an empty list",
            accepted=f"0 to {len(blocks) - 1}",
        )
    return [path for number, path in enumerate(blocks) if layers is None or number in layers]


def _linear_sites(
    model: PreTrainedModel, blocks: Sequence[str], rank: int, scale: float, targets: Sequence[str] | None
) -> list[Site]:
    prefixes = tuple(f"{path}." for path in blocks)
    found: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        module = module.get_base_layer() if isinstance(module, GatedLinear) else module
        sizes = module_sizes(module)
        if sizes is None or not path.startswith(prefixes) or ".lora_" in path or ".preft_" in path:
            continue
        path = path.removesuffix(".base_layer")
        is_expert = ".experts." in path or path.endswith((".router", ".gate"))
        wanted = not is_expert if targets is None else path.endswith(tuple(f".{target}" for target in targets))
        if wanted:
            found[path] = sizes
    missing = [target for target in targets or () if not any(path.endswith(f".{target}") for path in found)]
    if missing or not found:
        known = sorted({path.rpartition(".")[2] for path, module in model.named_modules() if module_sizes(module)})
        raise UsageError(
            "`targets` names no linear module of the model's blocks",
            got=f"`{missing[0]}`" if missing else "none",
            accepted=", ".join(f"`{last}`" for last in known if not last.isdigit())[:200],
        )
    return [Site(path, SiteKind.LINEAR, rank, *sizes, scale, has_bias=False) for path, sizes in found.items()]


def _starting_values(manifest: Manifest, seed: int, *, orthogonal: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.zeros(shape) for name, shape in expected_shapes(manifest).items()}
    for site in manifest.sites:
        prefix = tensor_prefix(site)
        if orthogonal and site.kind is SiteKind.BLOCK:
            if site.rank > site.out_features:
                raise UsageError(
                    "An orthogonal R has no such rank", got=str(site.rank), accepted=f"at most {site.out_features}"
                )
            nn.init.orthogonal_(values[f"{prefix}.up"], generator=generator)
        else:
            nn.init.kaiming_uniform_(values[f"{prefix}.down"], a=math.sqrt(5), generator=generator)
    return values


def _modules(model: nn.Module, site: Site, name: str) -> tuple[Any, Any]:
    """The `down` and `up` modules of a site."""
    module: Any = model.get_submodule(site.path)
    if site.kind is SiteKind.LINEAR:
        return module.lora_A[name], module.lora_B[name]
    update = next(child for child in module.children() if isinstance(child, GatedBlock))
    return update.preft_down[name], update.preft_up[name]


def _block_updates(handle: AttachedModel, name: str) -> list[nn.Module]:
    sites = handle.adapters[name].manifest.sites
    return [_modules(handle.model, site, name)[1] for site in sites if site.kind is SiteKind.BLOCK]


def _require_orthonormal(up: nn.Module, site: Site) -> None:
    if not parametrize.is_parametrized(up):
        return
    weight: Any = up.weight
    off = float((weight.T @ weight - torch.eye(site.rank, device=weight.device)).abs().max().detach())
    if not off < ORTHOGONAL_TOLERANCE:
        raise AdapterError(
            f"R at `{site.path}` is no longer orthogonal",
            got=f"off by {off:.2g}",
            hint="train it with `parameter_groups`, which keeps weight decay off it",
        )


def _require_trainable(handle: AttachedModel, name: str) -> None:
    if name not in handle.trainable:
        raise UsageError(
            f"No trainable adapter is named `{name}`",
            accepted=", ".join(f"`{known}`" for known in sorted(handle.trainable)) or "none",
        )
