"""Hosts, origins, a path prefix, TLS and the response headers of the server."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftproof.cli.main import _parse
from draftproof.cli.serve import read_settings
from draftproof.errors import ConfigError
from draftproof.serve.http.security import host_name
from draftproof.serve.settings import ApiKeys, Settings, default_hosts
from serving import serving, tiny

BODY = {"prompt": "one", "max_tokens": 1}


def test_unknown_host_is_refused_on_every_route(folder: Any) -> None:
    with serving(tiny(folder), Settings(allowed_hosts=(*default_hosts("127.0.0.1"), "*.lan"))) as running:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "lan", "localhost.evil"):
            for path in ("/", "/health", "/v1/models", "/page/icon.svg"):
                got = running.http.get(path, headers={"host": host})
                assert got.status_code == 403, (host, path)
            got = running.post("/v1/completions", BODY, headers={"host": host})
            error = got.json()["error"]
            assert (got.status_code, error["code"]) == (403, "host_not_allowed")
            assert error["type"] == "permission_error" and "--allowed-hosts" in error["message"]
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:8000", "localhost.", "gpu.lan"):
            assert running.post("/v1/completions", BODY, headers={"host": host}).status_code == 200, host


@pytest.mark.parametrize(
    ("arguments", "hosts"),
    [
        ([], ("localhost", "127.0.0.1", "::1")),
        (["--host", "127.0.0.2"], ("localhost", "127.0.0.1", "::1", "127.0.0.2")),
        (["--host", "0.0.0.0"], ("*",)),
        (["--allowed-hosts", "a.example", "--allowed-hosts", "b.example"], ("a.example", "b.example")),
        (["--allowed-hosts", '["a.example", "b.example"]'], ("a.example", "b.example")),
    ],
)
def test_hosts_of_the_command_line(arguments: list[str], hosts: tuple[str, ...]) -> None:
    assert read_settings(_parse(["serve", *arguments])).allowed_hosts == hosts


@pytest.mark.parametrize(
    ("header", "name"), [("A.B:80", "a.b"), ("[::1]", "::1"), ("[::1]:80", "::1"), ("x.", "x"), ("", "")]
)
def test_name_of_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_hosts": ("http://a",)}, "without scheme and port"),
        ({"allowed_hosts": ("a:80",)}, "without scheme and port"),
        ({"root_path": "api"}, "must begin with '/'"),
        ({"root_path": "/api/"}, "not end with it"),
        ({"ssl_keyfile": "key.pem"}, "needs ssl_certfile"),
        ({"ssl_certfile": "missing.pem"}, "missing.pem cannot be used"),
    ],
)
def test_wrong_settings_are_config_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**options)


@pytest.mark.parametrize("origins", [(), ("https://app.example",), ("*",)])
def test_allowed_origins_get_cors_headers(folder: Any, origins: tuple[str, ...]) -> None:
    keys = ApiKeys(["alpha"])
    with serving(tiny(folder), Settings(allowed_origins=origins, api_keys=keys)) as running:
        for origin in ("https://app.example", "https://evil.example"):
            headers = {"origin": origin, "authorization": "Bearer alpha"}
            wanted = {**headers, "access-control-request-method": "POST"}
            wanted["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
            allowed = "*" in origins or origin in origins
            preflight = running.http.options("/v1/completions", headers=wanted)
            got = running.post("/v1/completions", BODY, headers=headers)
            refused = running.post("/v1/completions", BODY, headers={"origin": origin})
            assert (preflight.status_code == 200) is allowed
            assert (got.status_code, refused.status_code) == (200, 401)
            for response in (preflight, got, refused):
                assert ("access-control-allow-origin" in response.headers) is allowed


def test_page_cannot_be_framed_or_sniffed(folder: Any) -> None:
    with serving(tiny(folder)) as running:
        for path in ("/", "/page/icon.svg"):
            headers = running.http.get(path).headers
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert headers["x-frame-options"] == "DENY" and headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-cache" and headers["x-content-type-options"] == "nosniff"
        for got in (running.http.get("/v1/models"), running.http.get("/nothing")):
            assert got.headers["x-content-type-options"] == "nosniff"
            assert "content-security-policy" not in got.headers


def test_root_path_keeps_routes_and_public_paths(folder: Any) -> None:
    """A proxy removes the prefix; the server adds it back to the paths that it sees."""
    with serving(tiny(folder), Settings(root_path="/llm", api_keys=ApiKeys(["alpha"]))) as running:
        for path in ("/health", "/", "/page/icon.svg"):
            assert running.http.get(path).status_code == 200, path
        assert running.http.get("/v1/models").status_code == 401
        headers = {"authorization": "Bearer alpha"}
        assert running.post("/v1/completions", BODY, headers=headers).status_code == 200
        assert running.app.state.metrics.requests["/v1/completions", 200] == 1


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """Return the files of a new certificate for localhost and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is needed to make a certificate")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=a"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return cert, key


def test_server_with_a_certificate_uses_tls(folder: Any, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with serving(tiny(folder), Settings(ssl_certfile=cert, ssl_keyfile=key)) as running:
        trusted = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=running.url, verify=trusted, timeout=300) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
            body = {**BODY, "max_tokens": 4, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(running.url.replace("https", "http") + "/health")
