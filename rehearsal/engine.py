"""SGLang in an environment on this machine, and the tiny model that is trained in it; both are made once."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from uv import find_uv_bin

from rehearsal import image, machine, settings

CHECKOUT = Path(__file__).resolve().parent.parent
LOCK = CHECKOUT / "files/locks/sglang-0.5.12.post1-cpu.txt"
DISK = 7.0  # GiB: the environment, which shares its files with uv's cache, and the downloads while they are unpacked


def ensure_environment() -> Path:
    """The interpreter of an environment with what `LOCK` pins, made first when it is not in the cache.

    Whoever wants other packages in it makes a copy: it is shared.
    """
    key = hashlib.sha256(LOCK.read_bytes() + platform.python_version().encode()).hexdigest()[:12]
    cache = image.cache_directory()
    machine.make_directory(cache)
    directory = cache / f"engine-{key}"
    finished = directory / "finished"  # written last: an environment without it was interrupted and is made anew
    with (cache / f"engine-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            machine.check_disk(cache, need=DISK, what="SGLang's environment", variable="XDG_CACHE_HOME")
            print(f"rehearsal: installing SGLang in {directory}: a minute or more, once", flush=True)
            started = time.monotonic()
            shutil.rmtree(directory, ignore_errors=True)
            _uv("venv", "--quiet", "--python", sys.executable, str(directory))
            _uv("pip", "sync", "--quiet", "--require-hashes", "--python", str(directory), str(LOCK))
            finished.touch()
            print(f"rehearsal: SGLang installed after {time.monotonic() - started:.0f} s", flush=True)
    return directory / "bin/python"


def ensure_model() -> Path:
    """The directory with the model (`target`, `draft`), trained first when it is not in the cache."""
    command = [str(ensure_environment()), "-m", "rehearsal_model"]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT / "files/rehearsal_model")}
    if subprocess.run(command, check=False, env=environment, stdin=subprocess.DEVNULL).returncode:
        raise machine.Unsuitable("training the rehearsal model failed, as it says above")
    command.append("--print-cache-directory")
    return Path(subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout.strip())


def _uv(*arguments: str) -> None:
    certificates = {"UV_SYSTEM_CERTS": "true"} if settings.CERTIFICATES.exists() else {}
    done = subprocess.run([find_uv_bin(), *arguments], check=False, env=os.environ | certificates)
    if done.returncode:
        raise machine.Unsuitable(f"uv {arguments[0]} failed, as it says above: are the package registries reachable?")
