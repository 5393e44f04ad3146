"""A server that speaks TLS, and files that are no certificate and no key."""

import http.client
import json
import ssl
import subprocess
import urllib.request

import grpc
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from helpers.serving import Server
from helpers.serving_clients import BODY, INFER, connect, limit_descriptors
from tfpolicies.cli import main
from tfpolicies.errors import UsageError
from tfpolicies.serving.tls import read_tls

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("kept_programs")]

P256 = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def write_certificate(folder, name, kind=P256):
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    words = ["req", "-x509", "-newkey", *kind, "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(["openssl", *words, *names, *files], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def files(home):
    return write_certificate(home, "server")


@pytest.fixture(scope="module")
def server(mlp, files):
    certificate, key = map(str, files)

    options = ["--tls-cert", certificate, "--tls-key", key, "--drain-seconds", "1"]
    with Server(mlp, *options, before=limit_descriptors) as running:
        yield running
        assert running.end() == 0


def infer(server, files):
    context = ssl.create_default_context(cafile=files[0])
    url = f"https://{server.http}{INFER}"
    with urllib.request.urlopen(url, BODY, timeout=60, context=context) as answer:
        return json.loads(answer.read())["model_name"]


def test_both_protocols_are_encrypted(server, files):
    assert infer(server, files) == "mlp"
    credentials = grpc.ssl_channel_credentials(files[0].read_bytes())
    with grpc.secure_channel(server.grpc, credentials) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=60).ready


def test_clear_text_gets_no_answer(server, files):
    with connect(server) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in connection.recv(1000)
    assert infer(server, files) == "mlp"


def test_clients_that_leave_out_the_handshake_shut_nobody_out(server, files):
    opened = [connect(server) for _ in range(200)]
    for _ in range(3):
        assert infer(server, files) == "mlp"
    for connection in opened:
        connection.close()


def test_idle_connections_give_way_to_new_ones(server, files):
    host, port = server.http.split(":")
    context = ssl.create_default_context(cafile=files[0])
    opened = []
    for _ in range(100):  # more than the descriptors that the server has for one address
        connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=context)
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b'{"live":true}'
        opened.append(connection)
    for connection in opened:
        connection.close()


def test_other_files_are_refused_by_name(home, files, tmp_path):
    certificate, key = files
    _, other = write_certificate(home, "other")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:x"]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    for pair, words in [
        ((certificate, other), r"other.key' is not the key of the certificate in .*server.crt'"),
        ((broken, key), r"--tls-cert .*broken.pem' must contain certificates in PEM"),
        ((key, key), r"--tls-cert .*server.key' must contain certificates"),
        ((certificate, certificate), r"--tls-key .*server.crt' must contain a private key in PEM"),
        ((certificate, locked), r"--tls-key .*locked.pem' is encrypted"),
        ((tmp_path / "none", key), r"--tls-cert .*none' cannot be read"),
        ((certificate, tmp_path), r"--tls-key .* cannot be read"),
    ]:
        with pytest.raises(UsageError, match=words):
            read_tls(*pair, pytest.fail)


EDWARDS = r"--tls-key .*weak.key' is an Ed25519 or Ed448 key, which gRPC does not accept"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rsa:1024", r"--tls-cert .*weak.crt' is too weak.*ee key too small.*RSA key of 2048 bits"),
        ("ed25519", EDWARDS),
        ("ed448", EDWARDS),
    ],
)
def test_keys_that_clients_could_not_use_are_refused(kind, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        read_tls(*write_certificate(tmp_path, "weak", [kind]), pytest.fail)


def test_an_rsa_key_is_taken(tmp_path):
    files = write_certificate(tmp_path, "rsa", ["rsa:2048"])
    assert read_tls(*files, pytest.fail).key == files[1].read_bytes()


def test_a_key_that_others_may_read_is_warned_of(files):
    key = files[1]
    key.chmod(0o644)
    warnings = []
    read_tls(*files, warnings.append)
    key.chmod(0o600)
    assert warnings == [f"Other users may read {key}. Restrict it to yourself: chmod 600 {key}."]


def test_a_certificate_needs_its_key(files, capsys):
    assert main(["serve", "anything", "--tls-cert", str(files[0])]) == 2
    assert "--tls-cert and --tls-key belong together" in capsys.readouterr().err
