"""A server that a test has started, and requests to it."""

import http.client
import json
import os
import re
import signal
import tempfile
from pathlib import Path

from commands import SCRIPTS, SMOE
from programs import HANGS, wait_until

JSON = {"Content-Type": "application/json"}


class Serving:
    """``smoe serve`` with these words on a free port, in a process of its own."""

    def __init__(self, *words, folder: Path | None = None):
        words = [str(SCRIPTS / "smoe"), "serve", *map(str, words), "--port", "0"]
        self.log = tempfile.NamedTemporaryFile("r")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(os.devnull) as nothing, open(self.log.name, "a") as log:
            files = (nothing.fileno(), log.fileno(), log.fileno())
            self.program = SMOE.start(words, environment, folder or os.getcwd(), files)
        pattern = re.compile(r"open http://(\S+):(\d+)/ ")
        wait_until(lambda: pattern.search(self.output) or self.program.wait(0) is not None)
        assert self.program.wait(0) is None, self.output
        self.host, self.port = (found := pattern.search(self.output))[1], int(found[2])
        self.url = f"http://{self.host}:{self.port}"

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *error) -> None:
        self.stop(signal.SIGKILL)
        self.log.close()

    @property
    def output(self) -> str:
        return Path(self.log.name).read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status after a signal."""
        if self.program.wait(0) is None:
            os.kill(self.program.pid, number)
        status = self.program.wait(HANGS)
        assert status is not None, self.output
        return status

    def request(self, method: str, path: str, body=None, headers=None):
        """(status, headers, content) of any request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANGS)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> dict:
        status, _, content = self.request("GET", path)
        assert status == 200, content
        return json.loads(content)

    def post(self, **asked) -> tuple[int, dict]:
        """Status and JSON of a translation."""
        status, _, content = self.request("POST", "/translate", json.dumps(asked), JSON)
        return status, json.loads(content)

    def translate(self, source: str, target: str, *texts: str, **more) -> list[dict]:
        status, content = self.post(texts=texts, source=source, target=target, **more)
        assert status == 200, content
        assert [each["text"] for each in content["translations"]] == list(texts)
        return content["translations"]
