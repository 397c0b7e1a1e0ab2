"""Options of the HTTP server: flags, SKIPSTONE_ variables and YAML keys are made from them as from the engine's."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LogFormat = Literal["text", "json"]

SECRETS = ("api_key",)  # options whose values are never shown


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server listens, who may use it, and how much it takes on."""

    host: Annotated[str, Meta(description="address to listen on; 0.0.0.0: every network")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port to listen on; 0: any free one")] = 8000
    served_model_name: Annotated[str | None, Meta(description="what clients call the model; none: its own name")] = None
    api_key: Annotated[
        str | list[str], Meta(description="key that requests must carry; may be repeated; the variable hides it best")
    ] = []
    cors_origin: Annotated[
        str | list[str], Meta(description="web origin whose pages may call the server, or *; may be repeated")
    ] = []
    allowed_host: Annotated[
        str | list[str],
        Meta(description="name in the Host header, or *; may be repeated; none: any, but on this machine only its own"),
    ] = []
    max_body_bytes: Annotated[Positive, Meta(description="longest request body")] = 8 << 20
    max_queue: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="most choices that wait for a place; beyond it the answer is 429")
    ] = 256
    request_timeout: Annotated[
        Seconds | None, Meta(description="seconds after which a request is given up; none: never")
    ] = 600.0
    client_timeout: Annotated[
        Seconds | None,
        Meta(description="seconds that clients may take to send a request, and longer at 10 kB/s; none: for ever"),
    ] = 30.0
    keep_alive: Annotated[
        Seconds | None, Meta(description="seconds without news after which a stream gets a comment; none: never")
    ] = 15.0
    shutdown_timeout: Annotated[
        Seconds, Meta(description="seconds that requests under way may take after SIGTERM or Ctrl-C")
    ] = 30.0
    log_format: Annotated[LogFormat, Meta(description="a line of key=value pairs, or a JSON object a line")] = "text"
    log_requests: Annotated[bool, Meta(description="write prompts to the log")] = False
    online: Annotated[
        Positive | None, Meta(description="compute one of this many verify steps again without drafts, and compare")
    ] = None
    ray: Annotated[bool, Meta(description="run replicas of the server with Ray Serve")] = False
    replicas: Annotated[
        Positive, Meta(description="replicas, each with a model of its own; more than 1 need --ray")
    ] = 1
    max_replicas: Annotated[
        Positive | None, Meta(description="start more under load, up to this many; none: always the same number")
    ] = None
    warmup: Annotated[
        Literal["all", "none"], Meta(description="GPU: what is compiled and captured before the first request")
    ] = "all"
    ui: Annotated[bool, Meta(description="serve the page at /")] = True
    metrics_prefix: Annotated[str, Meta(description="before the names of the metrics that vLLM also has")] = "vllm:"

    @property
    def api_keys(self) -> list[str]:
        """The keys as a list; empty: no key is needed."""
        return [self.api_key] if isinstance(self.api_key, str) else self.api_key

    @property
    def cors_origins(self) -> list[str]:
        """The origins as a list."""
        return [self.cors_origin] if isinstance(self.cors_origin, str) else self.cors_origin

    @property
    def hosts(self) -> list[str]:
        """What the Host header may be. A server without keys that only this machine reaches needs no other name."""
        allowed = [self.allowed_host] if isinstance(self.allowed_host, str) else self.allowed_host
        if not allowed and (self.api_keys or self.host not in LOOPBACK):
            return ["*"]
        return [*allowed, *LOOPBACK, "[::1]"]
