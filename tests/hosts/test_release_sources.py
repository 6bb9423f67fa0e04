"""Where a release comes from and when it goes: a fork of SGLang, wheels brought along, a private index, pruning.

The tests share a host and run in this order: each finds what the last one left.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deploy_target import ROOT, PlaybookUnderWay, State, Target, eventually, plain, recap
from package_index import NAME, Index, Proxy, serving
from rehearsal_commands import REPOSITORY

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

WORKER = "sglang/srt/speculative/eagle_worker.py"


class Fork:
    """A bare repository on this machine that is pushed to from a working copy of it."""

    def __init__(self, folder: Path) -> None:
        self.url, self.work = f"file://{folder}/fork.git", folder / "work"
        subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch=main", folder / "fork.git"], check=True)
        subprocess.run(["git", "clone", "--quiet", self.url, self.work], check=True, capture_output=True)

    def git(self, *arguments: str) -> str:
        command = ["git", "-c", "user.name=fork", "-c", "user.email=fork@example.org", "-C", self.work, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def push(self, message: str) -> str:
        """Commit everything to main; returns the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)
        self.git("push", "--quiet", "origin", "HEAD:main")
        return self.git("rev-parse", "HEAD")


@pytest.fixture(scope="module")
def fork(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Fork:
    """SGLang's released sources as a repository has them (without what its build makes), and one file more."""
    fork = Fork(tmp_path_factory.mktemp("fork"))
    (package,) = target.sh(f"ls -d {ROOT}/cache/archive-*/*/sglang").split()
    pack = f"sudo tar -C {Path(package).parent} -c --exclude=*.so --exclude=_version.py --exclude=__pycache__ sglang"
    packed = subprocess.run(["ssh", "-F", target.rehearsal.directory / "ssh_config", "rehearsal-1", pack],
                            check=True, capture_output=True).stdout  # fmt: skip
    (fork.work / "python").mkdir()
    subprocess.run(["tar", "-C", fork.work / "python", "-x"], input=packed, check=True)
    (fork.work / "python/pyproject.toml").write_text(
        '[project]\nname = "sglang"\ndynamic = ["version"]\n'
        'dependencies = ["torch==2.11.0", "transformers==5.6.0", "flashinfer_python==0.6.11.post1"]\n'
    )
    (fork.work / "python/sglang/srt/of_the_fork.py").write_text("HERE = True\n")
    fork.push("the release, and one file")
    return fork


def source(fork: Fork, ref: str = "main") -> dict[str, dict[str, str]]:
    return {"release_source": {"git": fork.url, "ref": ref}}


def test_a_fork_is_deployed_by_its_commit_and_proved(target: Target, fork: Fork) -> None:
    commit = fork.git("rev-parse", "HEAD")
    kernels = "/var/cache/sglang/{}/triton/kernel"
    kernel = kernels.format(Path(target.release()).name)
    target.sh(f"mkdir -p $(dirname {kernel}); echo compiled >{kernel}; chown -R sglang: /var/cache/sglang/*")
    done = target.deploy("--skip-tags", "load", **source(fork))
    assert done.returncode == 0, done.stdout
    assert "proof proved" in plain(done.stdout)
    deployed = target.deployed()
    release = json.loads(target.sh(f"cat {deployed['release_path']}/release.json"))
    assert deployed["commit"] == commit
    assert release["source"] == {"git": fork.url, "ref": "main", "commit": commit}
    packages = release["site_packages"]
    assert target.sh(f"cat {packages}/sglang/srt/of_the_fork.py") == "HERE = True"
    # Never editable, and nothing of it reached the cache that other releases are made from.
    assert target.sh(f"ls {packages} | grep -i editable || true") == ""
    assert target.sh(f"ls {ROOT}/cache/archive-*/*/sglang/srt/of_the_fork.py 2>/dev/null || true") == ""
    # Of the same packages: it began with the kernels that the released one had compiled.
    assert target.sh(f"cat {kernels.format(deployed['release'])}") == "compiled"
    again = target.deploy("--tags", "release,patch,service", **source(fork, ref=commit))
    assert recap(again.stdout)["changed"] == 0, again.stdout


def test_a_fork_that_changes_what_the_series_patches_is_refused(target: Target, fork: Fork, unharmed: State) -> None:
    worker = fork.work / "python" / WORKER
    worker.write_text(worker.read_text() + "# of the fork\n")
    fork.push("another worker")
    done = target.deploy(**source(fork))
    assert done.returncode != 0
    output = plain(done.stdout)
    assert f"says SGLang 0.5.12.post1, but {WORKER} is " in output
    assert "fork (release_source) that changes it, for which there is no patch series" in output


def test_a_fork_that_needs_other_packages_is_refused(target: Target, fork: Fork, unharmed: State) -> None:
    project = fork.work / "python/pyproject.toml"
    project.write_text(project.read_text().replace("torch==2.11.0", "torch==2.12.0"))
    fork.push("another torch")
    done = target.deploy(**source(fork))
    assert done.returncode != 0
    assert "torch is 2.11.0, asked for is torch==2.12.0" in plain(done.stdout)


def test_a_ref_that_is_not_there_is_refused(target: Target, fork: Fork, unharmed: State) -> None:
    done = target.deploy(**source(fork, ref="nowhere"))
    assert done.returncode != 0
    assert f"nowhere of {fork.url} cannot be had: " in plain(done.stdout)


def test_prune_keeps_what_is_active_was_active_or_runs(target: Target) -> None:
    """Beside the two real releases (the fork's, which is active, and the released one) stand four made-up ones."""
    active, former = target.release(), target.sh(f"dirname $(readlink -f {ROOT}/previous/deployment.json)")
    for name, year in {"old": 2001, "running": 2002, "used-late": 2003}.items():
        document = shlex.quote(json.dumps({"release": name}))
        target.sh(
            f"mkdir -p {ROOT}/releases/{name}/bin {ROOT}/deployments/of-{name} /var/cache/sglang/{name};"
            f"cp /usr/bin/sleep {ROOT}/releases/{name}/bin/; touch {ROOT}/releases/{name}/release.json;"
            f"echo {document} >{ROOT}/deployments/of-{name}/deployment.json;"
            f"touch -d {year}-01-01 {ROOT}/releases/{name}/release.json {ROOT}/deployments/of-{name}/deployment.json"
        )
    target.sh(f"mkdir {ROOT}/releases/half-built")
    target.sh(f"touch {ROOT}/deployments/of-used-late/deployment.json")
    target.sh(f"systemd-run --unit=holder {ROOT}/releases/running/bin/sleep 1000")
    done = target.deploy("--tags", "release,patch,service,prune", keep_releases=1, **source_of(target))
    assert done.returncode == 0, done.stdout
    left = set(target.sh(f"ls {ROOT}/releases").split())
    assert left == {Path(active).name, json.loads(target.sh(f"cat {former}/deployment.json"))["release"], "running",
                    "used-late"}  # fmt: skip
    assert "of-old" not in target.sh(f"ls {ROOT}/deployments").split()
    assert "old" not in target.sh("ls /var/cache/sglang").split()
    target.sh("systemctl stop holder")
    done = target.deploy("--tags", "release,patch,service,prune", keep_releases=1, **source_of(target))
    assert "running" not in target.sh(f"ls {ROOT}/releases").split()
    assert target.is_healthy()


def source_of(target: Target) -> dict[str, dict[str, str]]:
    """The fork that the active deployment is of, by its commit."""
    source = json.loads(target.sh(f"cat {target.release()}/release.json"))["source"]
    return {"release_source": {"git": source["git"], "ref": source["commit"]}}


@dataclass(frozen=True)
class SmallRelease:
    """The build of the role release itself, in a folder of its own, of a lock file that pins two small packages."""

    target: Target
    folder: Path
    root: str = "/opt/small"

    PACKAGES = ("setuptools", "packaging")

    @property
    def wheels(self) -> Path:
        return self.folder / "wheels"

    def play(self, **variables: Any) -> str:
        """Path of a playbook that builds it."""
        given = {
            "release_root": self.root,
            "release_lock": "small.txt",
            "_release_lock_path": str(self.folder / "small.txt"),
            "release_id": "small",
            "release_path": f"{self.root}/releases/small",
            "release_disk_mb": 1,
        } | variables
        role = {"name": "release", "apply": {"become": True}}
        play = [{"hosts": "all", "gather_facts": False,
                 "tasks": [{"ansible.builtin.include_role": role, "vars": given}]}]  # fmt: skip
        path = self.folder / "small.yml"
        path.write_text(json.dumps(play))
        return str(path)

    def assert_installed(self) -> None:
        found = self.target.sh(f"ls {self.root}/releases/small/lib/python3*/site-packages").split()
        assert {"spec_gate", *self.PACKAGES} <= set(found)


@pytest.fixture(scope="module")
def downloaded(target: Target, tmp_path_factory: pytest.TempPathFactory) -> SmallRelease:
    """The lock file, and its wheels as `make wheelhouse` downloads them."""
    small = SmallRelease(target, tmp_path_factory.mktemp("small"))
    lock = (REPOSITORY / "files/locks/sglang-0.5.12.post1-cpu.txt").read_text()
    pins = [pin for pin in lock.replace("\n    --hash", " --hash").replace(" \\ --hash", " --hash").splitlines()
            if pin.startswith(tuple(f"{name}==" for name in small.PACKAGES))]  # fmt: skip
    (small.folder / "small.txt").write_text("\n".join(pins) + "\n")
    done = target.rehearsal.run(["make", "--old-file=setup", "wheelhouse", f"lock={small.folder}/small.txt",
                                 f"wheelhouse={small.wheels}"])  # fmt: skip
    assert done.returncode == 0, done.stderr
    return small


@pytest.fixture
def small(downloaded: SmallRelease) -> Iterator[SmallRelease]:
    yield downloaded
    downloaded.target.sh(f"rm -rf {downloaded.root}")


@contextmanager
def cut_off(target: Target, *ports: int) -> Iterator[Callable[[], int]]:
    """On this machine the host's packets are dropped, but for SSH with it and those to its *ports*.

    Gives how many connections to elsewhere the host has tried.
    """
    address = target.sh("hostname --all-ip-addresses").split()[0]
    allowed = f"ip saddr {address} tcp sport 22 accept; " + "".join(
        f"ip saddr {address} tcp dport {port} accept; " for port in ports
    )
    dropped = f"ip saddr {address} tcp flags syn counter name tried drop; ip saddr {address} drop"
    chains = "".join(
        f"chain {hook} {{ type filter hook {hook} priority -10; {allowed}{dropped}; }}; "
        for hook in ("input", "forward")
    )
    rules = f"table inet specgate_test {{ counter tried {{ }}; {chains} }}"
    subprocess.run(["nft", "--file", "-"], input=rules, text=True, check=True)

    def tried() -> int:
        command = ["nft", "--json", "list", "counter", "inet", "specgate_test", "tried"]
        (counter,) = [entry["counter"] for entry in json.loads(subprocess.check_output(command))["nftables"]
                      if "counter" in entry]  # fmt: skip
        return int(counter["packets"])

    try:
        # The cut is one, and is counted.
        target.sh("! timeout 2 bash -c '</dev/tcp/192.0.2.1/443'")
        known = tried()
        assert known > 0
        yield lambda: tried() - known
    finally:
        subprocess.run(["nft", "delete", "table", "inet", "specgate_test"], check=True)


def test_a_release_is_built_from_wheels_brought_along_without_network(target: Target, small: SmallRelease) -> None:
    with cut_off(target) as tried:
        done = target.rehearsal.run_playbook(small.play(release_wheelhouse=str(small.wheels)))
        assert tried() == 0
    assert done.returncode == 0, done.stdout
    small.assert_installed()


@pytest.fixture
def index(target: Target, small: SmallRelease, tmp_path: Path) -> Iterator[Index]:
    """A private index that the host reaches through `proxy` alone."""
    with serving(index := Index(small.wheels, tmp_path)):
        target.rehearsal.run(["scp", "-F", target.rehearsal.directory / "ssh_config", index.authority,
                              "rehearsal-1:/tmp/authority.pem"])  # fmt: skip
        yield index
        index.go_on.set()


@pytest.fixture
def proxy(target: Target, index: Index) -> Iterator[Proxy]:
    """On this machine's address that the host has as its gateway."""
    with serving(proxy := Proxy(target.sh("ip route show default").split()[2], index)):
        yield proxy


def through(proxy: Proxy) -> dict[str, dict[str, str]]:
    """The variables for hosts behind a proxy with an index inside, as docs/release.md has them."""
    simple = f"https://{NAME}/simple"
    return {"release_environment": {
        "HTTPS_PROXY": proxy.url, "UV_DEFAULT_INDEX": simple, "PIP_INDEX_URL": simple,
        "SSL_CERT_FILE": "/tmp/authority.pem", "PIP_CERT": "/tmp/authority.pem", "UV_HTTP_RETRIES": "0",
    }}  # fmt: skip


def test_a_private_index_behind_a_proxy_is_all_that_is_asked(
    target: Target, small: SmallRelease, index: Index, proxy: Proxy
) -> None:
    with cut_off(target, proxy.server_port) as tried:
        done = target.rehearsal.run_playbook(small.play(**through(proxy)))
        assert tried() == 0
    assert done.returncode == 0, done.stdout
    small.assert_installed()
    assert proxy.asked == {f"{NAME}:443"}
    assert {wheel.partition("-")[0] for wheel in index.served} == {"uv", *small.PACKAGES}


def test_an_interrupted_build_is_resumed_with_what_it_had(
    target: Target, small: SmallRelease, index: Index, proxy: Proxy
) -> None:
    """The controller is killed while the host waits for the rest of a package, which goes on there for a while."""
    index.breaks_at = "setuptools"
    play = small.play(**through(proxy))
    with PlaybookUnderWay(target, play) as first:
        first.run_until("release : Install the locked packages")
        eventually(lambda: target.sh(f"find {small.root}/cache -name 'packaging-*.dist-info'") != "")
        first.kill()
        first.end()
    assert target.sh(f"pgrep --full '^flock {small.root}/build.lock .*uv pip sync' || true") != ""
    with PlaybookUnderWay(target, play) as second:
        second.run_until("release : Create the virtual environment")
        # It does not take the folder from under the first one, which gets no more of its package then.
        eventually(lambda: target.sh(f"pgrep --full '^flock {small.root}/build.lock .*uv venv' || true") != "")
        index.breaks_at = ""
        index.go_on.set()
        assert second.end() == 0, second.output
    small.assert_installed()
    assert [wheel.partition("-")[0] for wheel in index.served].count("packaging") == 1
