"""The commit of a fork: resolved from a bare repository, packed once, refused with git's own words."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest
from ansible.errors import AnsibleLookupError
from test_plugins import load

git_source = load("plugins/lookup/git_source.py")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A bare repository with two commits on main: python/a.txt is 1, then 2."""
    work = tmp_path / "work"
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(work))
    for text in ("1", "2"):
        commit(work, text)
    git(tmp_path, "clone", "--quiet", "--bare", str(work), str(tmp_path / "fork.git"))
    return f"file://{tmp_path}/fork.git"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True,
                          text=True).stdout.strip()  # fmt: skip


def commit(work: Path, text: str) -> None:
    (work / "python").mkdir(exist_ok=True)
    (work / "python/a.txt").write_text(text)
    git(work, "add", ".")
    git(work, "commit", "--quiet", "--message", text)


def content(found: dict[str, str]) -> dict[str, bytes]:
    with tarfile.open(found["archive"]) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}


def test_a_branch_is_its_commit_of_now_and_a_commit_is_itself(url: str, tmp_path: Path) -> None:
    first = git_source.fetch(url, "main", "python", tmp_path / "cache")
    assert first["commit"] == git(tmp_path / "work", "rev-parse", "HEAD")
    assert content(first) == {"a.txt": b"2"}
    commit(tmp_path / "work", "3")
    git(tmp_path / "work", "push", "--quiet", url, "main")
    assert content(git_source.fetch(url, "main", "python", tmp_path / "cache")) == {"a.txt": b"3"}
    again = git_source.fetch(url, first["commit"], "python", tmp_path / "cache")
    assert again == first
    assert content(again) == {"a.txt": b"2"}


def test_another_folder_is_another_archive(url: str, tmp_path: Path) -> None:
    found = [git_source.fetch(url, "main", folder, tmp_path / "cache") for folder in ("python", "")]
    assert [list(content(one)) for one in found] == [["a.txt"], ["python/a.txt"]]


@pytest.mark.parametrize(("asked", "reason"), [
    (("{url}", "nowhere", "python"), "couldn't find remote ref nowhere"),
    (("{url}", "main", "other"), "not a valid object name"),
    (("file:///nowhere.git", "main", "python"), "repository"),
    (("https://me:secret@example.org/x.git", "main", "python"), "the URL has a password in it"),
    (("--upload-pack=touch", "main", "python"), "must not begin with '-'"),
    (("{url}", "--help", "python"), "must not begin with '-'"),
])  # fmt: skip
def test_what_cannot_be_had_is_told(url: str, tmp_path: Path, asked: tuple[str, str, str], reason: str) -> None:
    where, ref, folder = asked
    with pytest.raises(git_source.SourceError, match=reason):
        git_source.fetch(where.format(url=url), ref, folder, tmp_path / "cache")


def test_the_lookup_names_what_was_asked_for(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_source, "CACHE", tmp_path / "cache")
    lookup = git_source.LookupModule()
    assert lookup.run([url], ref="main", subdirectory="python")[0]["commit"]
    with pytest.raises(AnsibleLookupError, match=r"nowhere of file://\S+ cannot be had: "):
        lookup.run([url], ref="nowhere", subdirectory="python")
    with pytest.raises(AnsibleLookupError, match=r"main of https://example.org/x.git cannot be had: the URL has"):
        lookup.run(["https://me:secret@example.org/x.git"], ref="main", subdirectory="python")
