"""The rehearsal hosts' parts that need neither root nor a host: refusals, subnets and registry settings."""

import hashlib
import platform
import shutil
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace

import pytest

from rehearsal import machine, network, settings
from rehearsal.host import Host, RehearsalDirectory

GIB = 2**30


def test_names_of_hosts(tmp_path):
    directory = RehearsalDirectory(tmp_path)
    assert Host(directory, "rehearsal-9").address(IPv4Network("198.18.7.0/24")) == "198.18.7.19"
    for name in ("rehearsal-0", "rehearsal-10", "web1", "", "../rehearsal-1", "rehearsal-1\n"):
        with pytest.raises(machine.Unsuitable, match="rehearsal-1 to rehearsal-9"):
            Host(directory, name)


def test_names_on_this_machine_fit_and_differ_between_checkouts(tmp_path):
    names = {Host(RehearsalDirectory(tmp_path / part), "rehearsal-1").machine_name for part in ("a", "b")}
    assert len(names) == 2
    assert all(len(f"vb-{name}") <= 15 for name in names)  # Linux's limit for an interface's name


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: machine.check_memory(need=10**6), r"needs 1e\+06 GiB of memory; .* are available"),
        (
            lambda: machine.check_disk(Path("/"), 10**6, "a thing", "A_DIR"),
            r"a thing needs 1e\+06 GiB of disk; / has .* set A_DIR",
        ),
    ],
)
def test_too_small_a_machine_is_refused(check, message):
    with pytest.raises(machine.Unsuitable, match=message):
        check()


def test_disk_that_is_just_large_enough(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10 * GIB))
    machine.check_disk(Path("/"), 10, "a thing", "A_DIR")
    with pytest.raises(machine.Unsuitable):
        machine.check_disk(Path("/"), 10.1, "a thing", "A_DIR")


def test_another_processor_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(machine.Unsuitable, match="x86_64; this machine is aarch64"):
        machine.check_processor()


@pytest.mark.parametrize(
    ("release", "found"),
    [
        ({"ID": "debian", "VERSION_CODENAME": "bookworm"}, ("debian", "bookworm")),
        ({"ID": "ubuntu", "VERSION_CODENAME": "noble"}, ("ubuntu", "noble")),
        ({"ID": "fedora", "PRETTY_NAME": "Fedora Linux 42"}, "Fedora Linux 42"),
        ({"ID": "debian", "PRETTY_NAME": "Debian GNU/Linux trixie/sid"}, "trixie/sid"),
        ({}, "this is ,|this is \\."),
    ],
)
def test_distribution(monkeypatch, release, found):
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    if isinstance(found, tuple):
        assert machine.distribution() == found
    else:
        with pytest.raises(machine.Unsuitable, match=found):
            machine.distribution()


def test_failed_command_says_what_and_why():
    with pytest.raises(machine.Unsuitable, match=r"(?s)making tea failed \(sh -c .*exit status 3\):\nno water"):
        machine.run(["sh", "-c", "echo no water >&2; exit 3"], what="making tea")


@pytest.fixture
def routes(monkeypatch):
    """The routes of a made-up machine without bridges."""
    table = [
        {"dst": "default", "dev": "eth0"},
        {"dst": "192.0.2.0/24", "dev": "eth0"},
        {"dst": "192.0.2.7", "dev": "lo"},
    ]
    monkeypatch.setattr(network, "_ip", lambda *_arguments: table)
    return table


def test_subnet_comes_from_the_path_and_avoids_what_is_routed(routes, tmp_path):
    first = network.Network(tmp_path).subnet()
    assert first == network.Network(tmp_path).subnet()
    assert first.subnet_of(network.RANGE)
    routes.append({"dst": str(first[77]), "dev": "tun0"})
    second = network.Network(tmp_path).subnet()
    assert not second.overlaps(first)
    assert second.subnet_of(network.RANGE)
    routes.append({"type": "unreachable", "dst": str(network.RANGE)})
    with pytest.raises(machine.Unsuitable, match=r"198\.18\.0\.0/15"):
        network.Network(tmp_path).subnet()


def test_every_start_finds_a_subnet(routes, monkeypatch, tmp_path):
    """From the last subnet of the range, when it is taken, the search goes on at the first."""
    monkeypatch.setattr(hashlib, "sha256", lambda _data: SimpleNamespace(hexdigest=lambda: f"{511:08x}"))
    assert network.Network(tmp_path).subnet() == IPv4Network("198.19.255.0/24")
    routes.append({"dst": "198.19.255.0/24", "dev": "tun0"})
    assert network.Network(tmp_path).subnet() == IPv4Network("198.18.0.0/24")


def test_registry_settings_of_a_plain_machine():
    plain = settings.RegistrySettings()
    assert plain.ports() == set()
    assert plain.files() == {
        "etc/environment": "\n",
        "etc/pip.conf": "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n",
        "etc/uv/uv.toml": "system-certs = true\n",
    }


def test_registry_settings_of_a_machine_behind_a_proxy(monkeypatch):
    pip = {
        "index-url": "http://pip.example:8081/simple",
        "extra-index-url": "https://more.example/simple file:///srv/simple",
        "trusted-host": "pip.example",
    }
    monkeypatch.setattr(settings, "pip_settings", lambda: pip)
    found = settings.read({"https_proxy": "http://proxy.example:3128", "NO_PROXY": "", "PATH": "/bin"})
    assert found == settings.RegistrySettings(
        proxies={"https_proxy": "http://proxy.example:3128"},
        index="http://pip.example:8081/simple",
        extra_indexes=("https://more.example/simple",),  # a folder of this machine is out of a host's reach
        trusted_hosts=("pip.example",),
    )
    assert found.ports() == {3128, 8081, 443}
    files = found.files()
    assert files["etc/environment"] == "https_proxy=http://proxy.example:3128\n"
    assert "extra-index-url = https://more.example/simple\n" in files["etc/pip.conf"]
    assert 'extra-index-url = ["https://more.example/simple"]\n' in files["etc/uv/uv.toml"]
    assert 'allow-insecure-host = ["pip.example"]\n' in files["etc/uv/uv.toml"]


def test_variables_of_uv_go_before_those_of_pip(monkeypatch):
    monkeypatch.setattr(settings, "pip_settings", lambda: {"index-url": "https://pip.example"})
    assert settings.read({"UV_INDEX_URL": "https://uv.example"}).index == "https://uv.example"
    both = {"UV_INDEX_URL": "https://uv.example", "UV_DEFAULT_INDEX": "https://default.example"}
    assert settings.read(both).index == "https://default.example"


def test_settings_are_those_that_pip_itself_reads(monkeypatch, tmp_path):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://file.example\nextra-index-url =\n  https://a\n  https://b\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    found = settings.pip_settings()
    assert (found["index-url"], found["extra-index-url"].split()) == (
        "https://file.example",
        ["https://a", "https://b"],
    )
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.example")
    assert settings.pip_settings()["index-url"] == "https://variable.example"


def test_certificates_are_the_machines_own(monkeypatch, tmp_path):
    (tmp_path / "bundle.crt").write_text("certificates")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "bundle.crt"))
    (tmp_path / "root/etc/ssl/certs").mkdir(parents=True)
    settings.copy_certificates(tmp_path / "root")
    assert (tmp_path / "root/etc/ssl/certs/ca-certificates.crt").read_text() == "certificates"
