"""A git server's side for gitsync's tests: real repositories, real ssh keys, signed commits."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from gitsync.layout import Layout
from gitsync.settings import GitsyncSettings, Ref, RefKind
from gitsync.tree.admit import MARKER

GOOD_TREE = {
    "prolog.d/10-hello": "#!/bin/bash\necho hello\n",
    "epilog.d/10-bye": "#!/bin/sh\necho bye\n",
    "lib/common.py": "def common() -> int:\n    return 1\n",
    "README.md": "scripts\n",
}


def run(*argv: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(word) for word in argv], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@dataclass
class Signer:
    name: str
    key: Path

    @classmethod
    def make(cls, folder: Path, name: str) -> Signer:
        key = folder / name
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", key)
        return cls(f"{name}@example.org", key)

    @property
    def allowed_line(self) -> str:
        kind, blob, *_ = self.key.with_suffix(".pub").read_text().split()
        return f'{self.name} namespaces="git" {kind} {blob}\n'


@dataclass
class Upstream:
    """The repository that people push to; `path` is bare, `work` is where commits are made."""

    path: Path
    work: Path
    clock: int = field(default_factory=lambda: int(time.time()) - 10_000)

    @classmethod
    def make(cls, folder: Path) -> Upstream:
        path, work = folder / "upstream.git", folder / "work"
        run("git", "init", "-q", "--bare", "-b", "main", path)
        run("git", "init", "-q", "-b", "main", work)
        (work / MARKER).write_text('{"name": "minivm-scripts"}\n')
        return cls(path, work)

    def environment(self) -> dict[str, str]:
        # Each commit a second after the other: the order of dates is the order of commits, at any speed.
        self.clock += 1
        date = f"{self.clock} +0000"
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.work),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_NAME": "Author",
            "GIT_AUTHOR_EMAIL": "author@example.org",
            "GIT_COMMITTER_NAME": "Author",
            "GIT_COMMITTER_EMAIL": "author@example.org",
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_DATE": date,
        }

    def git(self, *argv: str | Path) -> str:
        return run("git", "-C", self.work, *argv, env=self.environment())

    def write(self, files: dict[str, str | bytes | None]) -> None:
        """None removes; content with a `#!` line becomes executable."""
        for name, content in files.items():
            path = self.work / name
            if content is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content.encode() if isinstance(content, str) else content
            path.write_bytes(data)
            path.chmod(0o755 if data.startswith(b"#!") else 0o644)

    def commit(
        self, files: dict[str, str | bytes | None] | None = None, *, signer: Signer | None, push: bool = True
    ) -> str:
        self.write(files or {})
        self.git("add", "-A")
        sign = [] if signer is None else ["-c", "gpg.format=ssh", "-c", f"user.signingkey={signer.key}"]
        self.git(*sign, "commit", "-q", "--allow-empty", "-m", "change", *([] if signer is None else ["-S"]))
        if push:
            self.push()
        return self.git("rev-parse", "HEAD")

    def tag(self, name: str, *, signer: Signer | None) -> None:
        sign = [] if signer is None else ["-c", "gpg.format=ssh", "-c", f"user.signingkey={signer.key}"]
        self.git(*sign, "tag", "-f", "-a", "-m", name, *([] if signer is None else ["-s"]), name)
        self.push()

    def push(self) -> None:
        self.git("push", "-q", "--force", "--tags", self.path, "HEAD:refs/heads/main")


@dataclass
class World:
    folder: Path
    upstream: Upstream
    alice: Signer
    mallory: Signer
    settings: GitsyncSettings

    @classmethod
    def make(cls, folder: Path) -> World:
        alice, mallory = Signer.make(folder, "alice"), Signer.make(folder, "mallory")
        allowed = folder / "allowed_signers"
        allowed.write_text(alice.allowed_line)
        zero = folder / "zero"
        (zero / "prolog.d").mkdir(parents=True)
        (zero / "prolog.d/10-hello").write_text("#!/bin/sh\necho zero\n")
        upstream = Upstream.make(folder)
        settings = GitsyncSettings(
            repo=str(upstream.path),
            ref=Ref(RefKind.BRANCH, "main"),
            root=folder / "node",
            zero=zero,
            pod="pod-0",
            period=0.2,
            timeout=20.0,
            keep_seconds=0.0,
            ssh_key=folder / "no-key",
            known_hosts=folder / "no-known-hosts",
            token_file=folder / "no-token",
            allowed_signers=allowed,
            metrics=folder / "run/gitsync.prom",
            control=folder / "run/control.sock",
        )
        return cls(folder, upstream, alice, mallory, settings)

    @property
    def layout(self) -> Layout:
        return self.settings.layout

    def live(self) -> str:
        return Path(os.readlink(self.layout.current)).name  # noqa: PTH115  # the target's text, not its path
