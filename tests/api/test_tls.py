"""HTTPS: files that do not fit are told before anything starts; a live server; new certificates while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from graphrt.api.tls import make_context
from graphrt.api.tls import reload as reload_context
from graphrt.errors import ConfigError

PROGRAM = Path(__file__).with_name("scripted.py")


def files(folder: Path, cert: str, key: str) -> tuple[Path, Path]:
    (folder / "cert.pem").write_text(cert)
    (folder / "key.pem").write_text(key)
    return folder / "cert.pem", folder / "key.pem"


def refused(folder: Path, cert: str, key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_context(*files(folder, cert, key))
    return str(caught.value)


def test_what_is_wrong_with_the_files(tmp_path: Path, pem: Any) -> None:
    assert "is not that of the certificate" in refused(tmp_path, pem.CERT, pem.KEY_2)
    assert "is encrypted: give one without a password" in refused(tmp_path, pem.CERT, pem.KEY_ENCRYPTED)
    assert "cert.pem holds no -----BEGIN ... CERTIFICATE-----" in refused(tmp_path, pem.KEY, pem.KEY)
    assert "key.pem holds no -----BEGIN ... PRIVATE KEY-----" in refused(tmp_path, pem.CERT, pem.CERT)
    assert "cannot be used" in refused(tmp_path, pem.CERT[:300] + pem.CERT[340:], pem.KEY)
    assert "cannot be used" in refused(tmp_path, pem.CERT, pem.KEY[:80] + pem.KEY[100:])
    cert, key = files(tmp_path, pem.CERT, pem.KEY)
    key.unlink()
    with pytest.raises(ConfigError, match=r"the TLS key .*key.pem cannot be read: No such file"):
        make_context(cert, key)


def test_a_broken_reload_keeps_the_old_certificate(tmp_path: Path, pem: Any, caplog: pytest.LogCaptureFixture) -> None:
    context = make_context(*files(tmp_path, pem.CERT, pem.KEY))
    assert shown(context, pem) == ssl.PEM_cert_to_DER_cert(pem.CERT)
    assert not reload_context(context, *files(tmp_path, pem.CERT_2, pem.KEY))
    assert "stays in force" in caplog.text
    assert shown(context, pem) == ssl.PEM_cert_to_DER_cert(pem.CERT)
    assert reload_context(context, *files(tmp_path, pem.CERT_2, pem.KEY_2))
    assert shown(context, pem) == ssl.PEM_cert_to_DER_cert(pem.CERT_2)


def shown(context: ssl.SSLContext, pem: Any) -> bytes | None:
    """The certificate that a client of `context` sees."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_side=False)
    there = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (here, there):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return here.getpeercert(binary_form=True)


class Server:
    """scripted.py behind TLS and a key."""

    def __init__(self, folder: Path, pem: Any) -> None:
        self.cert, self.key = files(folder, pem.CERT, pem.KEY)
        self.keys = folder / "keys"
        self.keys.write_text("sk-0123456789abcdef\n")
        self.keys.chmod(0o600)
        words = [f"tls_cert={self.cert}", f"tls_key={self.key}", f"api_key_files={self.keys}"]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "0", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("graphrt serves"))
        self.url = line.split(" on ")[1].split(" ")[0]
        self.curl = next(line for line in self.process.stdout if line.startswith("curl"))
        self.port = int(self.url.rpartition(":")[2])

    def certificate(self) -> str:
        return ssl.get_server_certificate(("127.0.0.1", self.port), timeout=5)


@pytest.fixture
def server(tmp_path: Path, pem: Any) -> Iterator[Server]:
    made = Server(tmp_path, pem)
    yield made
    made.process.kill()
    made.process.communicate()


def test_https_with_a_key_and_a_reload(server: Server, pem: Any, tmp_path: Path) -> None:
    assert server.url.startswith("https://127.0.0.1:") and "authorization: Bearer $GRAPHRT_API_KEY" in server.curl
    trust = ssl.create_default_context(cadata=pem.CERT)
    head = {"authorization": "Bearer sk-0123456789abcdef"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 14, "seed": 5}
    with httpx.Client(verify=trust, base_url=server.url, headers=head) as client:
        whole = client.post("/v1/chat/completions", json=body).json()
        assert whole["choices"][0]["message"]["content"] == "word 5 word 5 "
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
            assert list(reply.iter_lines())[-2] == "data: [DONE]"
    assert httpx.get(server.url + "/v1/models", verify=trust).status_code == 401

    # Plain HTTP to the TLS port, and half a handshake, harm nobody.
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in plain.recv(100)
    socket.create_connection(("127.0.0.1", server.port), timeout=5).close()

    files(tmp_path, pem.CERT_2, pem.KEY_2)
    server.keys.write_text("sk-fedcba9876543210\n")
    os.kill(server.process.pid, signal.SIGHUP)
    assert server.process.stderr is not None
    said = ""
    while "TLS certificate reloaded" not in said:
        said = server.process.stderr.readline()
        assert said, "it ended"
    assert server.certificate().strip() == pem.CERT_2.strip()
    trust = ssl.create_default_context(cadata=pem.CERT_2)
    assert httpx.get(server.url + "/v1/models", verify=trust, headers=head).status_code == 401
    head = {"authorization": "Bearer sk-fedcba9876543210"}
    assert httpx.get(server.url + "/v1/models", verify=trust, headers=head).status_code == 200
    server.process.terminate()
    assert server.process.wait(10) == 0
