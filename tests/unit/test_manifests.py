"""The Kubernetes manifests and the Grafana dashboard: valid, and their commands and names are those of our servers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fastdeploy_sd.cluster.router.options import RouterConfig, read_router_options
from fastdeploy_sd.config import Config, load_config
from fastdeploy_sd.metrics.documentation import metrics_markdown, router_metrics_markdown

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "deploy"
FILES = sorted((FOLDER / "kubernetes").glob("*.yaml"))
DOCUMENTS = [document for path in FILES for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
PODS = [document["spec"]["template"] for document in DOCUMENTS if document["kind"] == "Deployment"]
VALUES = {
    "/models/Qwen3-0.6B": "demo",
    "$(POD_IP)": "10.0.0.7",
    "$(PD_SECRET)": "0123456789abcdef",
    "$(API_KEY)": "key",
}
_HTTP_END_S = 10


def _container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return container


def _options(container: dict[str, Any]) -> RouterConfig | Config:
    args = container["args"]
    for name, value in VALUES.items():
        args = [arg.replace(name, value) for arg in args]
    if container.get("command", [""])[-1] == "route":
        return read_router_options(args, "route")
    return load_config(args)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_documents_are_valid(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: _container(pod)["name"])
def test_a_container_listens_where_its_ports_and_probes_say(pod: dict[str, Any]) -> None:
    container = _container(pod)
    config = _options(container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == config.server.port
    assert ports.get("metrics") == config.server.metrics_port
    if isinstance(config, Config):
        assert tuple(port for name, port in ports.items() if name == "kv") == config.splitwise.pd_comm_port
    annotations = pod["metadata"].get("annotations", {})
    assert annotations.get("prometheus.io/port") == (str(ports["metrics"]) if "metrics" in ports else None)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: _container(pod)["name"])
def test_running_requests_may_finish_before_a_pod_is_killed(pod: dict[str, Any]) -> None:
    container = _container(pod)
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = _options(container).server.shutdown_timeout_s
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause_s + drain_s + _HTTP_END_S


def test_services_find_pods() -> None:
    services = [document for document in DOCUMENTS if document["kind"] == "Service"]
    assert len(services) == len(FILES)
    for service in services:
        wanted = service["spec"]["selector"]
        assert any(wanted.items() <= pod["metadata"]["labels"].items() for pod in PODS), service["metadata"]["name"]


def test_instances_register_with_the_service_of_the_router() -> None:
    services = {
        f"{document['metadata']['name']}:{document['spec']['ports'][0]['port']}"
        for document in DOCUMENTS
        if document["kind"] == "Service"
    }
    routers = [arg for pod in PODS for arg in _container(pod)["args"] if arg.startswith("--router=")]
    assert len(routers) == 2
    assert {arg.removeprefix("--router=") for arg in routers} <= services


def test_the_dashboard_asks_for_metrics_that_servers_and_routers_have() -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    names = {name for text in asked for name in re.findall(r"fastdeploy(?:_sd)?:\w+", text)}
    assert len(names) > 20
    known = re.findall(r"^\| `([\w:]+)`", metrics_markdown() + router_metrics_markdown(), re.MULTILINE)
    assert {name.removesuffix("_bucket") for name in names} <= set(known)
