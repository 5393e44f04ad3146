"""The commit of a repository is read from its files."""

import subprocess

import pytest

from tfpolicies.system.git_commit import find_commit

A, B = "a" * 40, "b" * 40


@pytest.fixture
def repository(tmp_path):
    """A repository as Git makes it, with one commit on the branch `main`."""

    def git(*words, folder=tmp_path):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(
            ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    git("commit", "-q", "--allow-empty", "-m", "one")
    return git


def test_the_commit_is_that_of_git_in_any_folder_of_the_repository(repository, tmp_path):
    (tmp_path / "src" / "deep").mkdir(parents=True)
    expected = repository("rev-parse", "HEAD")
    assert find_commit(tmp_path) == find_commit(tmp_path / "src" / "deep") == expected


def test_packed_branches_detached_heads_and_worktrees_are_read(repository, tmp_path):
    expected = repository("rev-parse", "HEAD")
    repository("pack-refs", "--all")
    assert find_commit(tmp_path) == expected
    repository("worktree", "add", "-q", str(tmp_path / "other"), "-b", "other")
    repository("commit", "-q", "--allow-empty", "-m", "two", folder=tmp_path / "other")
    assert find_commit(tmp_path / "other") == repository("rev-parse", "other")
    repository("checkout", "-q", "--detach")
    assert find_commit(tmp_path) == expected


def test_no_hook_or_program_of_the_repository_runs(repository, tmp_path):
    repository("config", "core.fsmonitor", f"touch {tmp_path / 'ran'}")
    assert find_commit(tmp_path) is not None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "head", ["", "ref: refs/heads/missing", "ref: refs/../../secret", "not a ref", A[:-1], "\0"]
)
def test_unreadable_repositories_have_no_commit(tmp_path, head):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(head)
    (tmp_path / ".git" / "packed-refs").write_text(f"{B} refs/heads/main\n")
    assert find_commit(tmp_path) is None


def test_a_folder_outside_of_repositories_has_no_commit(tmp_path):
    (tmp_path / ".git").write_text("gitdir: missing")
    assert find_commit(tmp_path) is None
