"""A commit of a git repository, resolved and packed on the controller; hosts need neither git nor access to it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
    name: git_source
    short_description: Fetches one commit and packs a folder of it
    description:
      - Fetches O(ref) (one commit, without history) into a cache in the home and packs its folder O(subdirectory)
        as a tar archive, once for each commit. Gives C({"commit", "archive"}), the full id and a path.
    options:
      _terms:
        description: URL of the repository, as C(git fetch) takes it.
        required: true
      ref:
        description: Branch, tag or full commit id.
        required: true
      subdirectory:
        description: Folder of the repository to pack.
        required: true
"""

CACHE = Path("~/.cache/specgate/sources")
TIMEOUT_S = 600


class SourceError(Exception):
    """The commit cannot be had; the message says what git said."""


def git(*arguments: str) -> str:
    """Output of one git command, which asks nobody for a password; raises SourceError with git's own words."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            env=os.environ | {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise SourceError("git is not installed on the controller") from None
    except subprocess.TimeoutExpired:
        raise SourceError(f"git {arguments[0]} took longer than {TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise SourceError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "git gave no reason")
    return done.stdout.strip()


def fetch(url: str, ref: str, subdirectory: str, cache: Path) -> dict[str, str]:
    """The commit that *ref* names now and an archive of its *subdirectory*; raises SourceError."""
    if re.match(r"[a-z+]+://[^/@]*:[^/@]*@", url):
        raise SourceError("the URL has a password in it, which would be kept with the release; let git find it")
    if ref.startswith("-") or url.startswith("-"):
        raise SourceError("URL and ref must not begin with '-'")
    repository = cache / hashlib.sha256(url.encode()).hexdigest()[:12]
    repository.mkdir(parents=True, exist_ok=True)
    # Hosts are handled at once, by as many processes.
    with open(repository / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        in_it = (f"--git-dir={repository / 'git'}",)
        git("init", "--quiet", "--bare", str(repository / "git"))
        git(*in_it, "fetch", "--quiet", "--no-tags", "--depth=1", url, ref)
        commit = git(*in_it, "rev-parse", "--verify", "FETCH_HEAD^{commit}")
        archive = repository / f"{commit}-{hashlib.sha256(subdirectory.encode()).hexdigest()[:12]}.tar.gz"
        if not archive.exists():
            partial = archive.with_suffix(".partial")
            git(*in_it, "archive", "--format=tar.gz", f"--output={partial}", f"{commit}:{subdirectory.strip('/')}")
            partial.rename(archive)
    return {"commit": commit, "archive": str(archive)}


class LookupModule(LookupBase):  # type: ignore[misc]
    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, str]]:
        found = []
        for url in terms:
            try:
                found.append(fetch(str(url), str(kwargs["ref"]), str(kwargs["subdirectory"]), CACHE.expanduser()))
            except (SourceError, OSError) as error:
                shown = re.sub(r"://[^/@]*@", "://", str(url))
                raise AnsibleLookupError(f"{kwargs['ref']} of {shown} cannot be had: {error}") from error
        return found
