"""The schema of `preft.json`: what an adapter is, in a form that no other tool mistakes for its own.

Neither the file's name nor its keys are those of PEFT: stock PEFT and stock vLLM would load a LoRA configuration and
silently adapt every token. Unknown keys are refused; a newer format version is refused with the way out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from preft.adapters.fingerprint import BaseFingerprint
from preft.errors import AdapterError, PreftError
from preft.positions import Policy
from preft.types import Site, SiteKind, adapter_kind, adapter_label

FORMAT_VERSION = 1
MANIFEST_NAME = "preft.json"
TENSORS_NAME = "preft.safetensors"
DTYPES = ("float32", "float16", "bfloat16")

_KEYS = {"format", "kind", "positions", "dtype", "sites", "base", "chat_template_sha256", "provenance", "digest"}
_SITE_KEYS = {"path", "kind", "rank", "in_features", "out_features", "scale", "bias"}
_BASE_KEYS = {"model", "architecture", "weights", "mismatch_allowed"}


@dataclass(frozen=True)
class Manifest:
    """Everything about an adapter but its numbers.

    Attributes:
        positions: Which prompt positions are adapted.
        dtype: Type of every tensor: `float32`, `float16` or `bfloat16`.
        sites: The places it acts on, sorted by path and kind.
        base: Fingerprint of the model it was made for.
        chat_template_sha256: Digest of the chat template it was trained with, or None.
        provenance: Where it comes from; free-form, does not enter the digest.
        digest: SHA-256 identity (see `preft.adapters.digest`), empty until computed.
    """

    positions: Policy
    dtype: str
    sites: tuple[Site, ...]
    base: BaseFingerprint
    chat_template_sha256: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""

    @property
    def kind(self) -> str:
        """`lora`, `direft` or `mixed`."""
        return adapter_kind(self.sites)

    @property
    def label(self) -> str:
        """The field's name for it, such as `LoRAP`."""
        return adapter_label(self.kind, prompt_only=self.positions.is_prompt_only)

    @property
    def max_rank(self) -> int:
        """The largest rank over all sites."""
        return max(site.rank for site in self.sites)

    def require_rank(self, limit: int) -> None:
        """Checks the largest rank against an engine's limit.

        Raises:
            AdapterError: It is larger.
        """
        if self.max_rank > limit:
            raise AdapterError(
                "The adapter's rank is above the engine's limit",
                got=f"{self.max_rank}",
                accepted=f"at most {limit}",
                hint="start the engine with a larger `--max-rank`",
            )

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `preft.json` holds."""
        return {
            "format": FORMAT_VERSION,
            "kind": self.kind,
            "positions": str(self.positions),
            "dtype": self.dtype,
            "digest": self.digest,
            "base": {**asdict(self.base), "architecture": dict(self.base.architecture)},
            "chat_template_sha256": self.chat_template_sha256,
            "provenance": dict(self.provenance),
            "sites": [_site_to_dict(site) for site in self.sites],
        }

    def to_json(self) -> str:
        """`to_dict` as text, one site to a line."""
        document = self.to_dict()
        sites = ",\n".join("    " + json.dumps(site) for site in document.pop("sites"))
        head = json.dumps(document, indent=2)[: -len("\n}")]
        return f'{head},\n  "sites": [\n{sites}\n  ]\n}}\n'

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, name: str = MANIFEST_NAME) -> Manifest:
        """Reads a manifest, refusing anything it does not know.

        Raises:
            AdapterError: A key is missing, unknown or of the wrong type; the format version is not ours.
        """
        _require_version(document, name)
        _require_keys(document, _KEYS, name)
        try:
            base = document["base"]
            _require_keys(base, _BASE_KEYS, f"{name}: base")
            manifest = cls(
                positions=Policy.parse(document["positions"]),
                dtype=document["dtype"],
                sites=tuple(_site_from_dict(site, name) for site in document["sites"]),
                base=BaseFingerprint(
                    base["model"], dict(base["architecture"]), base["weights"], bool(base["mismatch_allowed"])
                ),
                chat_template_sha256=document["chat_template_sha256"],
                provenance=dict(document["provenance"]),
                digest=document["digest"],
            )
        except PreftError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise AdapterError(f"`{name}` is not a valid manifest", got=f"{type(error).__name__}: {error}") from None
        _require_consistent(manifest, document, name)
        return manifest


def _require_version(document: Mapping[str, Any], name: str) -> None:
    version = document.get("format")
    if version == FORMAT_VERSION and not isinstance(version, bool):
        return
    newer = isinstance(version, int) and version > FORMAT_VERSION
    raise AdapterError(
        f"`{name}` has a format version that this `preft` does not read",
        got=repr(version),
        accepted=str(FORMAT_VERSION),
        hint="upgrade preft: the adapter was written by a newer one" if newer else None,
    )


def _require_keys(document: Mapping[str, Any], keys: set[str], name: str) -> None:
    if not isinstance(document, Mapping):
        raise AdapterError(f"`{name}` is not an object", got=type(document).__name__)
    unknown, missing = sorted(set(document) - keys), sorted(keys - set(document))
    if unknown or missing:
        parts = [f"unknown {unknown}"] * bool(unknown) + [f"missing {missing}"] * bool(missing)
        raise AdapterError(f"`{name}` has not the keys of a manifest", got="; ".join(parts), accepted=str(sorted(keys)))


def _require_consistent(manifest: Manifest, document: Mapping[str, Any], name: str) -> None:
    texts = {"base: model": manifest.base.model, "digest": manifest.digest}
    if manifest.chat_template_sha256 is not None:
        texts["chat_template_sha256"] = manifest.chat_template_sha256
    for key, value in texts.items():
        if not isinstance(value, str):
            raise AdapterError(f"`{name}` holds a `{key}` that is not text", got=repr(value)[:80])
    if not isinstance(document["base"]["mismatch_allowed"], bool):
        raise AdapterError(f"`{name}` holds a `base: mismatch_allowed` that is not true or false")
    if not manifest.sites:
        raise AdapterError(f"`{name}` names no site, so the adapter would do nothing")
    if manifest.dtype not in DTYPES:
        raise AdapterError(f"`{name}` names an unknown dtype", got=repr(manifest.dtype), accepted=str(DTYPES))
    if manifest.kind != document["kind"]:
        raise AdapterError(f"`{name}` says kind `{document['kind']}`", got=f"sites that make it `{manifest.kind}`")
    keys = [(site.path, site.kind) for site in manifest.sites]
    if keys != sorted(set(keys)):
        raise AdapterError(f"`{name}` lists its sites twice or out of order")


def _site_to_dict(site: Site) -> dict[str, Any]:
    document = asdict(site)
    document["kind"] = site.kind.value
    document["bias"] = document.pop("has_bias")
    return document


def _site_from_dict(document: Mapping[str, Any], name: str) -> Site:
    _require_keys(document, _SITE_KEYS, f"{name}: sites")
    counts = [document[key] for key in ("rank", "in_features", "out_features")]
    if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
        raise AdapterError(f"`{name}`: site `{document['path']}` has sizes that are not positive integers")
    scale = document["scale"]
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not isinstance(document["bias"], bool):
        raise AdapterError(f"`{name}`: site `{document['path']}` has a scale or bias of the wrong type")
    if not math.isfinite(scale):
        raise AdapterError(f"`{name}`: site `{document['path']}` has a scale that is not finite")
    if not isinstance(document["path"], str) or not document["path"]:
        raise AdapterError(f"`{name}`: a site has no path")
    site = Site(
        path=document["path"],
        kind=SiteKind(document["kind"]),
        rank=document["rank"],
        in_features=document["in_features"],
        out_features=document["out_features"],
        scale=float(scale),
        has_bias=document["bias"],
    )
    if site.kind is SiteKind.BLOCK and (site.in_features != site.out_features or site.scale != 1.0):
        raise AdapterError(f"`{name}`: block site `{site.path}` is not square or has a scale other than 1")
    return site
