"""`skipstone serve --ray`: replicas of the server on an existing cluster, or on this machine, with Ray Serve.

Routing by prompt beginnings, autoscaling, health checks and restarts are Ray's own.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody; read when ray is imported

import ray
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from skipstone.cli.output import note
from skipstone.config import EngineConfig
from skipstone.server.config import ServerConfig
from skipstone.server.ray.proxy import ReplicaProxy, Reports
from skipstone.server.ray.replica import Replica

LOG = logging.getLogger("skipstone.ray")
APPLICATION = "skipstone"
REPLICA, FRONT = "replica", "front"
# Its public name can be imported only beside vLLM or SGLang, which it does not need.
PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
UNEVEN = 4  # requests by which one replica may be ahead before its neighbour is preferred, whatever it has cached
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0
MANY = 100_000  # the replicas' own queues decide what is too much


def run(engine: EngineConfig, config: ServerConfig, quiet: bool) -> int:
    """Deploy, and stay until a signal comes. Returns the exit code."""
    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=not quiet, logging_level=logging.WARNING)
    serve.start(
        http_options=HTTPOptions(host=config.host, port=config.port),
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has set handlers of its own
        signal.signal(number, lambda *_: ended.set())
    try:
        deploy(engine, config)
        print(f"ready: http://{config.host}:{config.port}, {config.replicas} replicas", flush=True)
        ended.wait()
        note("ending: requests under way may go on for a while")
    finally:
        serve.delete(APPLICATION)  # waits for requests under way; their connections live until the next line
        serve.shutdown()
        ray.shutdown()
    return 0


def deploy(engine: EngineConfig, config: ServerConfig) -> None:
    """Start the application on the running cluster, and wait until all replicas are ready."""
    reports = ray.remote(Reports).options(num_cpus=0).remote()
    scale: dict[str, Any] = {"num_replicas": config.replicas}
    if config.max_replicas is not None:
        scale = {
            "autoscaling_config": {
                "min_replicas": config.replicas,
                "max_replicas": config.max_replicas,
                "target_ongoing_requests": max(engine.max_num_seqs // 2, 1),
            }
        }
    replicas = serve.deployment(
        Replica,
        name=REPLICA,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if engine.device == "cuda" else 0},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        **_router(),
        **scale,
    )
    most, patience = config.max_body_bytes, config.client_timeout

    def front() -> ASGIApp:
        return ReplicaProxy(serve.get_deployment_handle(REPLICA, APPLICATION), reports, most, patience)

    entry = serve.deployment(
        serve.ingress(front)(),
        name=FRONT,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.shutdown_timeout,
    )
    bound = replicas.bind(engine, config, reports)
    serve.run(entry.bind(bound), name=APPLICATION, route_prefix="/")


def _router() -> dict[str, Any]:
    """Ray's router by prompt beginnings, where the installed version has it; else its usual one."""
    try:
        return {
            "request_router_config": RequestRouterConfig(
                request_router_class=PREFIX_ROUTER, request_router_kwargs={"imbalanced_threshold": UNEVEN}
            )
        }
    except (ImportError, AttributeError, ValueError) as error:
        LOG.warning("requests are not routed by their beginnings", extra={"reason": str(error)})
        return {}
