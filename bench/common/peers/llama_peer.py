"""Comparison with llama.cpp on the same GGUF file in the same run.

The peer is the URL of a llama.cpp server, a Python in whose environment `xllamacpp` is installed, or a folder
where `npm install --ignore-scripts node-llama-cpp` ran. The Python runs this file, which imports nothing
else; node runs `llama_peer.mjs`. Both serve until their standard input is closed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
CONTEXT_TOKENS = 4096


class LlamaPeer:
    """llama.cpp's server with one model; speeds are those that it measures itself."""

    def __init__(self, peer: str, model: Path, threads: int) -> None:
        """Connect to a URL, or start the server with the Python or the packages of node at `peer`."""
        self._process: subprocess.Popen[str] | None = None
        if peer.startswith("http"):
            self.url, self.about = peer.rstrip("/"), {"url": peer}
            return
        command = [peer, __file__]
        if Path(peer).is_dir():
            command = ["node", str(Path(__file__).with_suffix(".mjs")), peer]
        command += [str(model), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"url"'):
                self.about = json.loads(line)
                self.url = self.about.pop("url")
                return
        raise RuntimeError(f"{peer} did not start a llama.cpp server: is its package installed there?")

    def speeds(self, ids: list[int], tokens: int) -> tuple[float, float]:
        """Return tokens a second of the prompt, and of greedy decoding after it."""
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
        data = json.dumps({**body, "cache_prompt": False}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completion", data, headers)
        with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
            timings: dict[str, Any] = json.load(response)["timings"]
        if timings["predicted_n"] != tokens or timings["prompt_n"] < len(ids):
            raise RuntimeError(f"llama.cpp computed other tokens than were requested: {timings}")
        return timings["prompt_per_second"], timings["predicted_per_second"]

    def close(self) -> None:
        """Stop a server that was started."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)


def serve(model: str, threads: int) -> None:
    """Serve `model` with xllamacpp; print the address, version and instructions as JSON."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.n_gpu_layers = CONTEXT_TOKENS, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 1  # errors
    server = xllamacpp.Server(params)
    about = {
        "url": server.listening_address,
        "xllamacpp": xllamacpp.__version__,
        "instructions": xllamacpp.get_system_info().strip(" |"),
    }
    print(json.dumps(about), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
