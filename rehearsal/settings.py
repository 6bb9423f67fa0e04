"""How this machine reaches the package registries, in the form of files for a host."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class RegistrySettings:
    """Proxies, indexes and certificates by which packages are reached from this machine."""

    proxies: Mapping[str, str] = field(default_factory=dict)
    index: str | None = None
    extra_indexes: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()

    def ports(self) -> set[int]:
        """The TCP ports of the proxies and indexes."""
        addresses = [*self.proxies.values(), self.index or "", *self.extra_indexes]
        split = [urlsplit(address) for address in addresses if "://" in address]
        return {port for part in split if (port := part.port or DEFAULT_PORTS.get(part.scheme))}

    def files(self) -> dict[str, str]:
        """The files of a host, by path, that give it these settings."""
        pip = ["[global]", f"cert = {CERTIFICATES}"]
        uv = ["system-certs = true"]  # the system's certificates, not uv's own
        if self.index:
            pip.append(f"index-url = {self.index}")
            uv.append(f'index-url = "{self.index}"')
        if self.extra_indexes:
            pip.append(f"extra-index-url = {' '.join(self.extra_indexes)}")
            uv.append(f"extra-index-url = {json.dumps(self.extra_indexes)}")
        if self.trusted_hosts:
            pip.append(f"trusted-host = {' '.join(self.trusted_hosts)}")
            uv.append(f"allow-insecure-host = {json.dumps(self.trusted_hosts)}")
        environment = [f"{name}={value}" for name, value in self.proxies.items()]
        contents = {"etc/environment": environment, "etc/pip.conf": pip, "etc/uv/uv.toml": uv}
        return {path: "\n".join(lines) + "\n" for path, lines in contents.items()}


def read(environment: Mapping[str, str] = os.environ) -> RegistrySettings:
    """This machine's settings: uv's variables first, then pip's variables and files as pip itself reads them."""
    pip = pip_settings()
    index = environment.get("UV_DEFAULT_INDEX") or environment.get("UV_INDEX_URL") or pip.get("index-url")
    return RegistrySettings(
        proxies={name: environment[name] for name in PROXIES if environment.get(name)},
        index=index,
        # An index in a folder of this machine is out of a host's reach.
        extra_indexes=tuple(url for url in pip.get("extra-index-url", "").split() if url.startswith("http")),
        trusted_hosts=tuple(pip.get("trusted-host", "").split()),
    )


def pip_settings() -> dict[str, str]:
    """pip's effective settings here; none where there is no pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    settings: dict[str, str] = {}
    # Lines such as `global.index-url='https://...'`; the variables, `:env:.`, are stronger than the files.
    for line in sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:.")):
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in {"global", ":env:"}:
            settings[key] = value.strip("'").replace("\\n", " ")
    return settings


def copy_certificates(root: Path) -> None:
    """Give the host below `root` the certificate authorities that this machine trusts, those of a proxy included."""
    bundle = Path(os.environ.get("SSL_CERT_FILE") or CERTIFICATES)
    if bundle.is_file():
        shutil.copyfile(bundle, root / CERTIFICATES.relative_to("/"))
