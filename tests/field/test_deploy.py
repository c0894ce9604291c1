# SPDX-License-Identifier: Apache-2.0
"""What lies in deploy/ is what the programs that read it accept.

No container engine and no cluster is needed: the files are validated against the
schemas of those who read them, the Dockerfile's steps run in an empty environment,
and the compose file's Prometheus starts with its own settings.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import venv
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from sizing.pod import memory_gib, startup_failures
from tests.e2e.prometheus import MISSING, Prometheus
from tests.promtool import needs_promtool, promtool
from tests.scripts.test_ops import page

from .load import load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VERSION = (ROOT / "VERSION").read_text().strip()
DOCKERFILES = ("Dockerfile", "Dockerfile.from-source")
SIZE_GIB, BASE_GIB, START_S = 64, 20, 600
"""Of all recipes."""
monitoring = load(DEPLOY / "kubernetes" / "monitoring.py")
all_only = pytest.mark.skipif(
    os.environ.get("KV_TIER_FIELD") != "all", reason="KV_TIER_FIELD=all: some minutes"
)


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


# ------------------------------------------------------------------ the Dockerfiles


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_against_it(name: str) -> None:
    run = subprocess.run(
        ["hadolint", DEPLOY / name], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr


def steps(name: str) -> list[str]:
    """Commands of the last stage, without mounts."""
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    last = text[text.rindex("\nFROM ") :]
    found = re.findall(r"^RUN (?:--mount=\S+ +)*(.*)$", last, re.MULTILINE)
    return [" ".join(step.split()) for step in found]


def test_both_end_in_the_same_image() -> None:
    first, second = (
        (DEPLOY / name).read_text().rpartition("\nFROM ")[2] for name in DOCKERFILES
    )
    labels = [re.search(r"LABEL .*?\n\n", text, re.DOTALL) for text in (first, second)]
    assert labels[0] and labels[1] and labels[0][0] == labels[1][0]
    assert steps(DOCKERFILES[0]) == steps(DOCKERFILES[1])


def image(folder: Path) -> Path:
    """An environment without vLLM that has what it needs; its python.

    Stands for upstream's image. Its packages are links to those of this environment.
    """
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        own = site / package.name
        if not package.name.startswith("vllm") and not own.exists():
            own.symlink_to(package)
    return folder / "bin" / "python3"


@all_only
def test_its_steps_run_in_an_environment_without_vllm(tmp_path: Path) -> None:
    core = f"{VERSION}.cpu"
    (wheel,) = (ROOT / "build" / "wheels").glob(f"vllm-0.32.0+{core}-*.whl")
    python = image(tmp_path / "venv")
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "TAG": "v0.32.0", "CORE": core}
    env.pop("PYTHONPATH", None)
    shell = ["bash", "-euo", "pipefail", "-c"]
    run = partial(subprocess.run, cwd=tmp_path, env=env, capture_output=True, text=True)
    install, check = steps("Dockerfile")
    assert run([*shell, check]).returncode != 0, "there is no vLLM yet"
    done = run([*shell, install.replace("/wheels/", f"{wheel.parent}/")])
    assert done.returncode == 0, done.stdout + done.stderr
    done = run([*shell, check])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"0.32.0+{core}" in done.stdout
    assert run([*shell, check], env=env | {"CORE": "core.0"}).returncode != 0


# ----------------------------------------------------------------------- Kubernetes


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    command = ["kubernetes-validate", "--strict", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_kubernetes_takes_the_manifests(tmp_path: Path) -> None:
    for name in ("vllm.yaml", "keeper.yaml"):
        run = validate(DEPLOY / "kubernetes" / name)
        assert run.returncode == 0, run.stdout + run.stderr
    wrong = tmp_path / "wrong.yaml"
    text = (DEPLOY / "kubernetes" / "vllm.yaml").read_text()
    wrong.write_text(text.replace("failureThreshold", "failuresAllowed"))
    assert validate(wrong).returncode != 0


def test_kserve_s_container_is_one_of_kubernetes(tmp_path: Path) -> None:
    """Its schema is in no package; what it passes on to a pod is checked."""
    (service,) = documents("kserve/inferenceservice.yaml")
    spec = service["spec"]["predictor"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "predictor"},
        "spec": {name: spec[name] for name in ("containers", "volumes")},
    }
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(pod))
    run = validate(path)
    assert run.returncode == 0, run.stdout + run.stderr


def containers() -> dict[str, dict[str, Any]]:
    """Container, or what the chart makes one of, by file."""
    deployment = documents("kubernetes/vllm.yaml")[0]
    (service,) = documents("kserve/inferenceservice.yaml")
    (values,) = documents("helm/production-stack.yaml")
    engine = values["servingEngineSpec"]
    (model,) = engine["modelSpec"]
    memory = {"memory": model["requestMemory"]}
    assert model["requestMemory"] == model["limitMemory"]
    return {
        "kubernetes": deployment["spec"]["template"]["spec"]["containers"][0],
        "kserve": service["spec"]["predictor"]["containers"][0],
        "helm": {
            "args": model["vllmConfig"]["extraArgs"],
            "resources": {"requests": memory, "limits": memory},
            "startupProbe": engine["startupProbe"],
        },
    }


@pytest.mark.parametrize("name", ["kubernetes", "kserve", "helm"])
def test_memory_and_probe_are_those_of_the_formulas(name: str) -> None:
    container = containers()[name]
    assert f"--kv-offloading-size={SIZE_GIB}" in container["args"]
    wanted = f"{memory_gib(SIZE_GIB, BASE_GIB)}Gi"
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["memory"] == wanted
    probe = container["startupProbe"]
    assert probe["periodSeconds"] == 5
    assert probe["failureThreshold"] == startup_failures(SIZE_GIB, START_S)


@pytest.mark.parametrize("name", ["kubernetes", "kserve", "helm"])
def test_settings_are_json(name: str) -> None:
    for argument in containers()[name]["args"]:
        if "={" in argument:
            json.loads(argument.partition("=")[2])


def test_monitoring_has_the_rules_of_ops() -> None:
    path = DEPLOY / "kubernetes" / "monitoring.yaml"
    assert path.read_text() == monitoring.page(), "run monitoring.py, see there"
    monitor = documents("kubernetes/monitoring.yaml")[0]["spec"]
    service = documents("kubernetes/vllm.yaml")[2]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= ports


@needs_promtool
def test_prometheus_takes_the_rules_of_the_operator(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump(documents("kubernetes/monitoring.yaml")[1]["spec"]))
    run = promtool("check", "rules", rules)
    assert run.returncode == 0, run.stdout + run.stderr


@all_only
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_the_operator_takes_them(tmp_path: Path) -> None:
    package = "@kubernetes-models/prometheus-operator"
    npm = ["npm", "install", "--silent", "--no-fund", f"{package}@6.0.0"]
    subprocess.run(npm, cwd=tmp_path, check=True, timeout=300)
    script = f"""
        import * as kinds from "{package}/monitoring.coreos.com/v1";
        for (const one of JSON.parse(process.argv[1]))
            new kinds[one.kind](one).validate();
    """

    def run(objects: list[dict[str, Any]]) -> int:
        flags = ["--input-type=module", "-e", script, "--"]
        command = ["node", *flags, json.dumps(objects)]
        return subprocess.run(command, cwd=tmp_path, timeout=60).returncode

    objects = monitoring.objects()
    assert run(objects) == 0
    objects[0]["spec"]["endpoints"] = "http"
    assert run(objects) != 0


# -------------------------------------------------------------------------- compose


def test_compose_takes_the_file() -> None:
    # As compose does first, where nothing is set.
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    compose_spec.PyCompose.from_yaml(text).validate()
    with pytest.raises(Exception, match="healthchek"):
        compose_spec.PyCompose.from_yaml(text.replace("healthcheck", "healthchek"))


def test_what_compose_mounts_is_there() -> None:
    (compose,) = documents("compose/compose.yaml")
    volumes = [v for s in compose["services"].values() for v in s.get("volumes", ())]
    paths = [v.split(":")[0] for v in volumes if v.startswith(".")]
    assert len(paths) == 5
    for path in paths:
        assert (DEPLOY / "compose" / path).is_file(), path
    named = {v.split(":")[0] for v in volumes if not v.startswith(".")}
    assert named == set(compose["volumes"])
    assert compose["services"]["vllm"]["mem_limit"] == "${VLLM_MEMORY:-84g}"


@pytest.fixture
def metrics_server() -> Iterator[HTTPServer]:
    """Shows a page as vLLM's /metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page().encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.mark.skipif(MISSING, reason="Prometheus is not installed")
def test_compose_s_prometheus_starts_with_its_settings(
    metrics_server: HTTPServer, tmp_path: Path
) -> None:
    text = (DEPLOY / "compose" / "prometheus.yml").read_text()
    address = "127.0.0.1:{}".format(metrics_server.server_address[1])
    assert "vllm:8000" in text
    config = text.replace("vllm:8000", address).replace("15s", "1s")
    rules = (ROOT / "ops" / "alerts.yml").read_text()
    own = Prometheus(
        f"http://{address}", Path("alerts.yml"), tmp_path / "own", config, rules
    )
    try:
        own.wait_for("vllm:kv_tier_host_slots")
        assert own.query('up{job="vllm"}')[0]["value"][1] == "1"
        assert len(own.rules()) == 5
    finally:
        own.stop()


def test_grafana_finds_its_source_and_dashboard() -> None:
    (sources,) = documents("compose/grafana/datasources.yml")
    (compose,) = documents("compose/compose.yaml")
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    (dashboards,) = documents("compose/grafana/dashboards.yml")
    folder = dashboards["providers"][0]["options"]["path"]
    targets = [v.split(":")[1] for v in compose["services"]["grafana"]["volumes"]]
    assert f"{folder}/kv-tier.json" in targets


# ---------------------------------------------------------------- beside other packages


def would_install(*arguments: str | Path) -> tuple[int, str]:
    """What pip would do to the environment of this test."""
    pip = [shutil.which("pip") or "pip", "--python", sys.executable, "install"]
    done = subprocess.run(
        [*pip, "--dry-run", *arguments], capture_output=True, text=True, timeout=300
    )
    installs = re.findall(r"Would install (.*)", done.stdout)
    return done.returncode, " ".join(installs)


def test_the_constraint_keeps_the_patched_vllm(tmp_path: Path) -> None:
    text = (DEPLOY / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^vllm==(.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"[\d.]+\+core\.\d+", pinned)
    constraint = tmp_path / "constraints.txt"
    constraint.write_text(f"vllm=={version('vllm')}\n")
    code, installs = would_install("-U", "vllm", "-c", constraint)
    assert code == 0 and "vllm-" not in installs
    code, _ = would_install("vllm==0.31.0", "-c", constraint)
    assert code != 0, "another release would have been taken"
    # Which is what the constraint is for.
    _, installs = would_install("vllm==0.31.0", "--no-deps")
    assert "vllm-0.31.0" in installs
