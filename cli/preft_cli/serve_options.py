"""The options of `preft serve`; a function that names each with its help would be a page long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Slots = Annotated[int, typer.Option("--slots", min=1, help="Adapters that one step may hold.")]
MaxRank = Annotated[int, typer.Option("--max-rank", min=1, help="Largest adapter rank accepted.")]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", min=1, help="Longest prompt plus output; default: the model's.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
KvCacheGib = Annotated[float, typer.Option("--kv-cache-gib", help="Size of the KV cache in GiB.")]
AdapterCacheGib = Annotated[float, typer.Option("--adapter-cache-gib", help="Host memory for adapters in GiB.")]
LmHead = Annotated[bool, typer.Option("--lm-head", help="Accept adapters with an `lm_head` site.")]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Compile the model: a slow first start, then faster steps. CPU only.")
]
Host = Annotated[str, typer.Option("--host", help="Interface to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", help="What clients call the base model; repeatable. Default: its name."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="File with the key that clients must present."),
]
KeysFile = Annotated[
    Path | None,
    typer.Option("--keys-file", metavar="FILE", help="JSON of further keys, each with the adapters it may use."),
]
AdminKeyFile = Annotated[
    Path | None,
    typer.Option("--admin-key-file", metavar="FILE", help="File with the key that changes of adapters over HTTP need."),
]
Watch = Annotated[bool, typer.Option("--watch", help="Take up adapters that change below ROOT.")]
MaxPushMib = Annotated[int, typer.Option("--max-push-mib", min=1, help="Largest adapter accepted over HTTP, in MiB.")]
AccessLog = Annotated[
    Path | None, typer.Option("--access-log", metavar="FILE", help="Append a line of JSON for each request.")
]
StatusPage = Annotated[
    bool, typer.Option("--status-page/--no-status-page", help="Answer `/preft` with a page that shows the server.")
]
AdapterMetrics = Annotated[
    bool, typer.Option("--adapter-metrics", help="Count requests and cached tokens by adapter name in `/metrics`.")
]
AdapterMetricsLimit = Annotated[
    int, typer.Option("--adapter-metrics-limit", min=1, help="Names counted at most; the rest are `other`.")
]
