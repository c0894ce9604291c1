# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes one server."""

import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

MISSING = shutil.which("prometheus") is None

_CONFIG = """
global: {{scrape_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: vllm
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    """Scrapes `url` each second.

    Args:
        url: Of a server with `/metrics`.
        rules: File of alert rules.
        folder: Its own; keeps what it scraped.
        settings: Text of its settings, in place of ours.
        rules_text: To be written to `rules`, which lies in `folder` then.

    """

    def __init__(
        self,
        url: str,
        rules: Path,
        folder: Path,
        settings: str | None = None,
        rules_text: str | None = None,
    ) -> None:
        folder.mkdir()
        target = urllib.parse.urlparse(url).netloc
        config = folder / "prometheus.yml"
        config.write_text(settings or _CONFIG.format(target=target, rules=rules))
        if rules_text is not None:
            (folder / rules).write_text(rules_text)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        self._url = f"http://{address}/api/v1"
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an expression now.

        Raises:
            ValueError: Prometheus does not understand it.

        """
        data = urllib.parse.urlencode({"query": expression}).encode()
        try:
            with urllib.request.urlopen(f"{self._url}/query", data, 30) as response:
                return json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from error

    def rules(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self._url}/rules", timeout=30) as response:
            groups = json.load(response)["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_for(self, expression: str, timeout_s: float = 60) -> None:
        """Until an expression has a value.

        Raises:
            TimeoutError: It has none in time.

        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self.query(expression):
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise TimeoutError(f"no {expression}:\n{self._log.read_text()[-3000:]}")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
