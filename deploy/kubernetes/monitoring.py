# SPDX-License-Identifier: Apache-2.0
"""Write monitoring.yaml, for the Prometheus Operator, from ops/alerts.yml.

python deploy/kubernetes/monitoring.py > deploy/kubernetes/monitoring.yaml
"""

import sys
from pathlib import Path
from typing import Any

import yaml

ALERTS = Path(__file__).parents[2] / "ops" / "alerts.yml"
HEAD = "# Written by deploy/kubernetes/monitoring.py; do not edit.\n"


def objects() -> list[dict[str, Any]]:
    """A ServiceMonitor and a PrometheusRule."""
    labels = {"app": "vllm-kv-tier"}
    monitor = {
        "selector": {"matchLabels": labels},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
    }
    api = "monitoring.coreos.com/v1"
    metadata = {"name": "vllm-kv-tier", "labels": labels}
    return [
        {
            "apiVersion": api,
            "kind": "ServiceMonitor",
            "metadata": metadata,
            "spec": monitor,
        },
        {
            "apiVersion": api,
            "kind": "PrometheusRule",
            "metadata": metadata,
            "spec": yaml.safe_load(ALERTS.read_text()),
        },
    ]


def page() -> str:
    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return HEAD + yaml.dump_all(objects(), Dumper=Plain, sort_keys=False, width=88)


if __name__ == "__main__":
    sys.stdout.write(page())
