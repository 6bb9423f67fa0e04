"""The role cuda on a host of its own, with a signed repository there whose packages have NVIDIA's names and no content.

No driver is ever loaded there: a file in place of /proc/driver/nvidia/version stands for one.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy_target import Target, plain, recap
from rehearsal_commands import REPOSITORY, booted

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

DRIVER, TOOLKIT, PORT = "580.126.20", "13.0.2", 8399
TOOLKIT_PACKAGES = {
    "cuda-toolkit-13-0": (f"{TOOLKIT}-1", True),
    "cuda-compiler-13-0": (f"{TOOLKIT}-1", True),
    "cuda-nvcc-13-0": ("13.0.88-1", True),
}
REPOSITORY_ON_HOST = "/srv/repository/debian12/x86_64"
FILES = (
    "/etc/apt/sources.list.d/nvidia-cuda.list /etc/apt/preferences.d/nvidia-cuda /usr/share/keyrings/cuda-* "
    "/etc/modprobe.d/nvidia-specgate.conf /etc/modules-load.d/nvidia-specgate.conf "
    "/etc/systemd/system/nvidia-persistenced.service.d"
)

MAKE_REPOSITORY = r"""
apt-get update -qq
apt-get install -qq --yes --no-install-recommends gpg gpg-agent git make patch python3-venv >/dev/null 2>&1
# All that the host needs of Debian's packages is there now; apt is slow with tens of thousands of others.
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*
mkdir -p FOLDER && cd FOLDER
package() {  # name, version, further fields
  mkdir -p work/DEBIAN
  unit=  # the packages without one have not even a folder: dpkg drops packages of shared folders
  case $1 in
    nvidia-persistenced) unit='[Unit]\nStopWhenUnneeded=true\n[Service]\nExecStart=sleep infinity\n' ;;  # as Ubuntu's
    nvidia-fabricmanager) unit='[Service]\nExecStart=sleep infinity\n[Install]\nWantedBy=multi-user.target\n' ;;
  esac
  if [ "$unit" ]; then mkdir -p work/lib/systemd/system; printf "$unit" >work/lib/systemd/system/$1.service; fi
  printf 'Package: %s\nVersion: %s\nArchitecture: amd64\nMaintainer: test <test@example.org>\nDescription: test\n%b' \
    "$1" "$2" "${3:-}" >work/DEBIAN/control
  dpkg-deb --build work "$1_$2.deb" >/dev/null
  rm -r work
}
for version in 570.10.01 DRIVER 590.48.01; do
  package nvidia-driver-cuda $version-1 "Depends: libcuda1 (= $version-1), libnvidia-any\n"
  package nvidia-kernel-open-dkms $version-1 "Depends: make\n"
  package libcuda1 $version-1
  package libnvidia-any $version-1
  package nvidia-persistenced $version-1
  package nvidia-fabricmanager $version-1
done
# One driver that would bring another kernel.
package linux-image-9.9.9-test 1
package nvidia-driver-cuda 577.01.01-1 "Depends: linux-image-9.9.9-test\n"
package nvidia-kernel-open-dkms 577.01.01-1
package nvidia-persistenced 577.01.01-1
# As NVIDIA's: groups that allow newer members, and parts with versions of their own.
for version in TOOLKIT 13.0.3; do
  package cuda-compiler-13-0 $version-1 "Depends: cuda-nvcc-13-0 (>= 13.0.88)\n"
done
package cuda-nvcc-13-0 13.0.88-1
package cuda-toolkit-13-0 TOOLKIT-1 "Depends: cuda-compiler-13-0 (>= TOOLKIT)\n"
package nvlsm 2025.06.11-1
package linux-headers-$(uname -r) 1
for file in *.deb; do
  dpkg-deb --field "$file"
  printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "$file" "$(stat --format=%s "$file")" \
    "$(sha256sum "$file" | cut -d' ' -f1)"
done >Packages
{ echo "Date: $(date -uR)"; echo SHA256:
  echo " $(sha256sum Packages | cut -d' ' -f1) $(stat --format=%s Packages) Packages"; } >Release
export GNUPGHOME=/var/lib/test-key && mkdir -p -m 700 $GNUPGHOME
gpg --batch --quiet --passphrase '' --quick-generate-key test ed25519 sign never 2>/dev/null
gpg --batch --quiet --clearsign --output InRelease Release
gpg --batch --quiet --export >cuda-archive-keyring.gpg
printf '%s\n' '[Service]' 'ExecStart=python3 -m http.server --bind 127.0.0.1 --directory /srv/repository PORT' \
  '[Install]' 'WantedBy=multi-user.target' >/etc/systemd/system/repository.service
systemctl enable --quiet --now repository
gpg --list-keys --with-colons | sed -n 's/^fpr:*\([0-9A-F]*\):$/\1/p' | head -n 1
"""


class CudaHost(Target):
    """The host, and the play that provisions it."""

    fingerprint: str

    def provision(self, *arguments: str, **extra: Any) -> subprocess.CompletedProcess[str]:
        given = {
            "cuda_driver_version": DRIVER,
            "cuda_toolkit_version": TOOLKIT,
            "cuda_repository": f"http://127.0.0.1:{PORT}",
            "cuda_key_fingerprint": self.fingerprint,
        } | extra
        return self.rehearsal.run_playbook("playbooks/provision.yml", "-e", json.dumps(given), *arguments)

    def installed(self) -> dict[str, tuple[str, bool]]:
        """The packages of the test's repository that are installed: version, and whether they are held."""
        lines = self.sh(
            "dpkg-query --show --showformat='${Package} ${Version} ${db:Status-Status} ${db:Status-Want}\\n' "
            "'*nvidia*' 'libcuda*' 'cuda-*' 'nvlsm' 'linux-image-*' 2>/dev/null || true"
        ).splitlines()
        rows = [line.split() for line in lines]
        return {name: (version, want == "hold") for name, version, status, want in rows if status == "installed"}

    def untouched(self) -> bool:
        return self.installed() == {} and self.sh(f"ls {FILES} 2>/dev/null || true") == ""


@pytest.fixture(scope="module")
def host() -> Iterator[CudaHost]:
    with booted(REPOSITORY / ".rehearsal/cuda") as rehearsal:
        host = CudaHost(rehearsal)
        script = MAKE_REPOSITORY
        for name, value in (
            ("FOLDER", REPOSITORY_ON_HOST), ("DRIVER", DRIVER), ("TOOLKIT", TOOLKIT), ("PORT", str(PORT)),
        ):  # fmt: skip
            script = script.replace(name, value)
        object.__setattr__(host, "fingerprint", host.sh(script).splitlines()[-1])
        yield host


def test_check_mode_on_a_bare_host_verifies_the_repository_and_touches_nothing(host: CudaHost) -> None:
    done = host.provision("--check", "--diff")
    assert done.returncode == 0, done.stdout
    assert f"+deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg,{host.fingerprint}]" in done.stdout
    assert host.untouched()


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"cuda_key_fingerprint": "0" * 40}, "cuda_key_fingerprint is 0000"),
        ({"cuda_driver_version": "580"}, "allowed are full versions, such as 580.126.20"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_touched(
    host: CudaHost, extra: dict[str, str], reason: str
) -> None:
    done = host.provision(**extra)
    assert done.returncode != 0
    assert reason in plain(done.stdout)
    assert "Nothing was touched" in plain(done.stdout)
    assert host.untouched()


def test_a_signature_that_does_not_fit_is_refused(host: CudaHost) -> None:
    folder = REPOSITORY_ON_HOST
    host.sh(f"cp {folder}/InRelease /tmp/kept && sed -i 's/Packages/Pockages/' {folder}/InRelease")
    done = host.provision()
    host.sh(f"cp /tmp/kept {folder}/InRelease")
    assert done.returncode != 0
    assert "is signed by no key of its keyring" in plain(done.stdout)
    assert host.untouched()


def test_a_running_server_keeps_its_driver(host: CudaHost) -> None:
    host.sh("systemd-run --quiet --unit=sglang sleep infinity")
    done = host.provision()
    host.sh("systemctl stop sglang")
    assert done.returncode != 0
    assert "serves (sglang.service), and its driver is none, not 580.126.20" in plain(done.stdout)
    # And one that was started by hand; a file stands for the device.
    host.sh("touch /dev/nvidia-uvm; systemd-run --quiet --unit=by-hand sh -c 'exec sleep infinity </dev/nvidia-uvm'")
    done = host.provision()
    host.sh("systemctl stop by-hand; rm /dev/nvidia-uvm")
    assert done.returncode != 0
    assert re.search(r"serves \(process \d+ sleep\), and its driver is none", plain(done.stdout))
    assert host.untouched()


def test_a_driver_that_would_bring_another_kernel_is_refused(host: CudaHost) -> None:
    done = host.provision(cuda_driver_version="577.01.01")
    assert done.returncode != 0
    assert "the kernel would change (linux-image-9.9.9-test)" in plain(done.stdout)
    assert host.installed() == {}


def test_the_pinned_versions_are_installed_with_their_dependencies_and_held(host: CudaHost) -> None:
    done = host.provision()
    assert done.returncode == 0, done.stdout
    driver = (f"{DRIVER}-1", True)
    assert (
        host.installed()
        == {
            "nvidia-driver-cuda": driver,
            "nvidia-kernel-open-dkms": driver,
            "nvidia-persistenced": driver,
            "libcuda1": driver,
            "libnvidia-any": driver,  # the repository has a newer one, with which the driver would do as well
        }
        | TOOLKIT_PACKAGES
    )
    held = host.sh("apt-mark showhold").splitlines()
    assert f"linux-headers-{host.sh('uname -r')}" in held
    assert "make" not in held, "the distribution's own packages get their updates"
    assert "must be rebooted: the loaded driver is none, installed is 580.126.20" in plain(done.stdout)


@pytest.mark.parametrize("arguments", [(), ("--check", "--diff")])
def test_a_second_run_changes_nothing(host: CudaHost, arguments: tuple[str, ...]) -> None:
    before = host.installed()
    done = host.provision(*arguments)
    assert done.returncode == 0, done.stdout
    assert recap(done.stdout)["changed"] == 0
    assert host.installed() == before
    assert "0 upgraded" in host.sh("apt-get --simulate upgrade")


def test_another_pin_replaces_the_driver_both_ways(host: CudaHost) -> None:
    for version in ("590.48.01", DRIVER):
        done = host.provision(cuda_driver_version=version)
        assert done.returncode == 0, done.stdout
        assert host.installed()["libcuda1"] == host.installed()["nvidia-driver-cuda"] == (f"{version}-1", True)


def test_a_reboot_after_which_the_driver_is_not_loaded_is_a_failure(host: CudaHost) -> None:
    boot = host.sh("cat /proc/sys/kernel/random/boot_id; systemctl show --property=UserspaceTimestampMonotonic")
    done = host.provision(cuda_reboot_allowed=True)
    assert done.returncode != 0
    assert "was rebooted, and its driver is none, not 580.126.20" in plain(done.stdout)
    assert host.sh("cat /proc/sys/kernel/random/boot_id; systemctl show --property=UserspaceTimestampMonotonic") != boot


NVIDIA_SMI = """#!/bin/sh
case "$*" in
  "--query-gpu=index --format=csv,noheader") seq 0 7 ;;
  --query-gpu=*) cat /srv/nvidia/gpus-rtx-pro-6000.csv ;;
  "topo -m") cat /srv/nvidia/topology-8-pcie.txt ;;
  "topo -p2p r") cat /srv/nvidia/p2p-8-pcie.txt ;;
  --persistence-mode=1) touch /run/persistence ;;
  *) exit 9 ;;
esac
"""


def load_driver(host: CudaHost) -> None:
    """Make the host look as if the pinned driver, with open modules, were loaded, and nvidia-smi told of such cards."""
    for name in ("gpus-rtx-pro-6000.csv", "topology-8-pcie.txt", "p2p-8-pcie.txt"):
        text = (REPOSITORY / "tests/data/nvidia" / name).read_text().replace("580.126.09", DRIVER)
        host.sh(f"mkdir -p /srv/nvidia; printf %s {shlex.quote(text)} >/srv/nvidia/{name}")
    host.sh(f"printf %s {shlex.quote(NVIDIA_SMI)} >/usr/local/bin/nvidia-smi; chmod +x /usr/local/bin/nvidia-smi")
    text = (REPOSITORY / "tests/data/nvidia/driver-open.txt").read_text().replace("580.126.09", DRIVER)
    host.sh("mountpoint -q /proc/driver || mount -t tmpfs tmpfs /proc/driver; mkdir -p /proc/driver/nvidia; "
            f"printf %s {shlex.quote(text)} >/proc/driver/nvidia/version")  # fmt: skip


def test_once_the_driver_is_loaded_its_daemons_run(host: CudaHost) -> None:
    """Of a host that turns out to have switches behind network cards. No module is loaded: there are stand-ins."""
    load_driver(host)
    host.sh("cd /usr/local/sbin; for name in modprobe nvidia-modprobe; do "
            "printf '#!/bin/sh\\necho \"$@\" >>/run/%s\\n' $name >$name; chmod +x $name; done")  # fmt: skip
    done = host.provision(cuda_fabric_manager=True)
    host.sh("rm /usr/local/sbin/modprobe /usr/local/sbin/nvidia-modprobe")
    assert done.returncode == 0, done.stdout
    assert "must be rebooted" not in plain(done.stdout)
    assert host.installed()["nvidia-fabricmanager"] == (f"{DRIVER}-1", True)
    assert "nvlsm" in host.installed()
    units = "nvidia-persistenced nvidia-fabricmanager"
    states = host.sh(f"systemctl is-active {units}; systemctl is-enabled {units}")
    assert states.split() == ["active", "active", "enabled", "enabled"]
    assert host.sh("ls /run/persistence; cat /run/modprobe") == "/run/persistence\nib_umad"
    assert host.sh("cat /run/nvidia-modprobe") == "--unified-memory --create-nvidia-device-file=0"
    modules = host.sh("cat /etc/modules-load.d/nvidia-specgate.conf").splitlines()
    assert modules[1:] == ["nvidia-uvm", "ib_umad"]
    # A switches' module that is not loaded would be: its stand-in did nothing.
    assert recap(host.provision("--check", "--diff", cuda_fabric_manager=True).stdout)["changed"] == 1


def test_a_host_whose_driver_satisfies_the_pins_is_not_touched(host: CudaHost) -> None:
    """As on a machine that came with its driver: its packages are neither pinned nor held, no option is set."""

    def purge() -> None:
        names = " ".join(host.installed())
        host.sh(f"apt-mark unhold {names} >/dev/null; apt-get purge --yes {names} >/dev/null; rm -rf {FILES}")

    purge()
    load_driver(host)
    done = host.provision(cuda_disable_hmm=True)
    assert done.returncode == 0, done.stdout
    assert host.installed() == TOOLKIT_PACKAGES
    assert "nvidia" not in host.sh("grep ^Package: /etc/apt/preferences.d/nvidia-cuda")
    purge()
    done = host.provision(cuda_toolkit_version="", cuda_disable_hmm=True)
    assert done.returncode == 0, done.stdout
    assert recap(done.stdout)["changed"] == 0
    assert host.untouched()


@pytest.fixture
def mine(host: CudaHost, tmp_path: Path) -> Path:
    """A copy of the example for eight RTX PRO 6000, made one's own, with a host that looks like such a one."""
    load_driver(host)
    folder = tmp_path / "mine"
    shutil.copytree(REPOSITORY / "inventory/blackwell/rtx-pro-6000", folder)
    reached = f"rehearsal-1\n          ansible_ssh_common_args: -F {host.rehearsal.directory}/ssh_config"
    hosts = folder / "hosts.yml"
    hosts.write_text(hosts.read_text().replace("gpu-1.example.org", reached))
    set_for_tests = {
        "cuda_repository": f"http://127.0.0.1:{PORT}",
        "cuda_key_fingerprint": host.fingerprint,
        "acceptance_reports": str(tmp_path / "reports"),
    }
    (folder / "group_vars/all/tests.yml").write_text(json.dumps(set_for_tests))
    return folder


def test_doctor_and_the_preflight_say_the_same_of_a_gpu_host(host: CudaHost, mine: Path) -> None:
    """With a stand-in for nvidia-smi that prints what users published; no card is on the bus, and no model there."""
    done = host.rehearsal.fab("doctor", "--json", f"--inventory={mine}")
    assert done.returncode == 1, done.stderr
    (entry,) = json.loads(done.stdout)["hosts"]
    states = {each["name"]: each["state"] for each in entry["checks"]}
    good = ("driver", "open_modules", "driver_loaded", "gpu_count", "gpu_name", "gpu_capability", "gpu_memory")
    more = ("gpu_ecc", "gpu_mig", "gpu_persistence", "pcie_link", "topology", "peer_to_peer", "gpu_numa")
    assert {name: states[name] for name in good + more} == dict.fromkeys(good + more, "pass")
    assert (states["iommu"], states["acs"], states["target_path"]) == ("unknown", "unknown", "fail")

    done = host.rehearsal.run_playbook("deploy.yml", "--tags", "preflight", f"--inventory={mine}")
    assert done.returncode != 0
    for reason in entry["reasons"]:
        assert plain(reason) in plain(done.stdout)


def test_a_deploy_of_the_example_in_check_mode_goes_through_and_touches_nothing(host: CudaHost, mine: Path) -> None:
    """Accepted is what no rehearsal host has: the cards' place on the bus, the memory, the models. Debian's packages
    cannot be had there, so what compiles is a stand-in too."""
    host.sh("install -D --mode=755 /bin/true /usr/local/bin/g++; install -D /dev/null /usr/include/python3.11/Python.h")
    accepted = json.dumps({"preflight_accepted": ["memory", "iommu", "acs", "target_path", "draft_path"]})
    done = host.rehearsal.run_playbook("deploy.yml", "--check", "--diff", "-e", accepted, f"--inventory={mine}")
    assert done.returncode == 0, done.stdout
    for planned in ("+DeviceAllow=char-nvidia*", "+    --tp-size 8", "would serve on 127.0.0.1:30000"):
        assert planned in done.stdout
    assert host.untouched()
    assert host.sh("ls -d /opt/sglang /etc/systemd/system/sglang.service 2>/dev/null || true") == ""


MAKE_SOURCES = r"""
printf '%s\n' '#!/bin/sh' 'case $1 in' '-S) mkdir -p "$4" && touch "$4/CMakeCache.txt" ;;' \
  '*) printf "#!/bin/sh\necho {}\n" >"$2/nvbandwidth" && chmod +x "$2/nvbandwidth" ;; esac' >/usr/local/bin/cmake
chmod +x /usr/local/bin/cmake
git init --quiet /srv/git && cd /srv/git
printf 'build/all_reduce_perf:\n\tmkdir -p build; ' >Makefile
printf 'printf "#!/bin/sh\\necho $(NCCL_HOME) \$$LD_LIBRARY_PATH \$$*\\n" >$@; chmod +x $@\n' >>Makefile
git add Makefile && git -c user.name=test -c user.email=test@example.org commit --quiet --message=test
git tag v1
"""


MAKE_RELEASE = r"""
mkdir -p /opt/sglang/current /srv/release/nvidia/nccl/lib /srv/release/nvidia/nccl/include
touch /srv/release/nvidia/nccl/lib/libnccl.so.2
printf '#!/bin/sh\nPYTHONPATH=/srv/release exec /usr/bin/python3 "$@"\n' >/srv/release/python
chmod +x /srv/release/python
echo '{"python": "/srv/release/python"}' >/opt/sglang/current/deployment.json
"""


def test_bandwidth_is_measured_where_nothing_serves_and_saved_by_host(host: CudaHost, tmp_path: Path) -> None:
    """With stand-ins of both programs, of cmake, nvcc and a release: what is tested is the play."""
    load_driver(host)
    host.sh(MAKE_SOURCES)
    programs = ("nccl_tests", "nvbandwidth")
    given = {"bandwidth_packages": ["git", "make"], "bandwidth_results": str(tmp_path)}
    given |= {f"bandwidth_{name}_repository": "/srv/git" for name in programs}
    given |= {f"bandwidth_{name}_version": "v1" for name in programs}

    def measure() -> subprocess.CompletedProcess[str]:
        return host.rehearsal.run_playbook("playbooks/bandwidth.yml", "-e", json.dumps(given))

    host.sh("systemd-run --quiet --unit=sglang sleep infinity")
    done = measure()
    host.sh("systemctl stop sglang")
    assert done.returncode != 0
    assert "serves (sglang.service), and it would be measured as well as disturbed" in plain(done.stdout)

    done = measure()
    assert done.returncode != 0
    assert "has no nvcc" in plain(done.stdout)
    host.sh("printf '#!/bin/sh\n' >/usr/local/bin/nvcc; chmod +x /usr/local/bin/nvcc")

    done = measure()
    assert done.returncode != 0
    assert "libnccl2=2.28.9-*, libnccl-dev=2.28.9-*, which only NVIDIA's repository has" in plain(done.stdout)
    assert "Deploy first" in plain(done.stdout)

    host.sh(MAKE_RELEASE)
    done = measure()
    host.sh("rm -r /opt/sglang /usr/local/bin/nvcc")
    assert done.returncode == 0, done.stdout
    (folder,) = (tmp_path / "rehearsal-1").iterdir()
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found.keys() == {"topology.txt", "gpus.csv", "nvbandwidth.json", "all_reduce.txt"}
    nccl = "/opt/bandwidth/nccl /srv/release/nvidia/nccl/lib"
    assert host.sh("readlink /opt/bandwidth/nccl/lib/libnccl.so") == "/srv/release/nvidia/nccl/lib/libnccl.so.2"
    assert found["all_reduce.txt"] == f"{nccl} --minbytes=8K --maxbytes=512M --stepfactor=2 --ngpus=8\n"
