"""`skipstone serve`: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import re
import socket

import msgspec

from skipstone.cli.model import open_model
from skipstone.cli.options import Command, Settings
from skipstone.cli.output import note
from skipstone.config import EngineConfig
from skipstone.errors import ConfigError, needing
from skipstone.models.locate import locate
from skipstone.server.config import LOOPBACK, ServerConfig


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Serve until a signal ends it. The port is taken before the model is loaded."""
    config = ServerConfig(**{name: settings.values[name] for name in ServerConfig.__struct_fields__})
    _check(config)
    if config.ray:
        return _run_on_ray(config, settings, args.quiet)
    with needing("serve", "serve"):
        # uvicorn imports these when it starts, which is after the model is loaded
        import httptools  # noqa: F401
        import uvloop  # noqa: F401

        from skipstone.server.http_server import serve
        from skipstone.server.step_observer import StepObserver
    listener = listen(config)
    with listener:
        observer = StepObserver()
        with open_model(settings, args.quiet, observer) as (llm, _):
            if config.warmup == "all":
                llm.engine.warm_up(_tick)
            return serve(llm, config, listener, observer, quiet=args.quiet)


def _tick(done: int, total: int) -> None:
    if done * 4 // total > (done - 1) * 4 // total:
        note(f"warm-up: {done} of {total} kinds of steps")


def _run_on_ray(config: ServerConfig, settings: Settings, quiet: bool) -> int:
    engine = settings.engine_config()
    folder = locate(engine.model)
    listen(config).close()
    with needing("serve,ray", "serve --ray"):
        from skipstone.server.ray import serve as ray_serve
    # Replicas may start in another folder than this one.
    return ray_serve.run(msgspec.structs.replace(engine, model=str(folder.resolve())), config, quiet)


def listen(config: ServerConfig) -> socket.socket:
    """A socket on the server's address. Raises ConfigError when it cannot be had."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"host={config.host}, port={config.port} cannot be used: {error.strerror}; pass another --port or --host"
        ) from None
    return listener


def _check(config: ServerConfig) -> None:
    if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", config.metrics_prefix):
        raise ConfigError(f"metrics_prefix={config.metrics_prefix!r} must consist of letters, digits, _ and :")
    for key in config.api_keys:
        if not key.strip() or not key.isascii() or key != key.strip():
            raise ConfigError("api_key must be plain ASCII text without spaces at its ends, and not empty")
    if not config.ray and (config.replicas > 1 or config.max_replicas is not None):
        raise ConfigError(
            f"replicas={config.replicas} and max_replicas={config.max_replicas} need Ray Serve; pass --ray"
        )
    if config.max_replicas is not None and config.max_replicas < config.replicas:
        raise ConfigError(f"max_replicas={config.max_replicas} is less than replicas={config.replicas}; raise it")
    if config.host not in LOOPBACK and not config.api_keys:
        note(f"warning: listening on {config.host} without an --api-key: whoever reaches it can use it")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is shown")
    group.add_argument("-q", "--quiet", action="store_true", help="no start-up card")


COMMAND = Command(
    summary="an OpenAI-compatible HTTP server",
    usage="MODEL [options]",
    options={ServerConfig: None, EngineConfig: None},
    run=run,
    add_arguments=_add_arguments,
)
