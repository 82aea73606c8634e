"""Harbor's environment of a task in a sandbox on this machine, without a daemon.

What can be made of a Dockerfile without a build is made: ``COPY``, ``ENV`` and ``WORKDIR``, above the machine's own
programs or a prepared root file system. All else is refused by name. What a sandbox writes lies in memory, and is gone
with it.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import enclose
from enclosed import EnclosedSandbox, EndedCommand, add_to
from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode
from harbor_dockerfile import ROOT_USERS, TaskDockerfile, TaskRefused

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HOME = "/root"
_FOLDERS = ("/logs", "/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests", "/solution")
_TIME_IS_UP = 124
_ARCHIVE_BYTES = 16 << 20
"""Room for the names of an archive. Files with holes, which take no room in a sandbox, would make one of any length."""
_TASK = "{task}"


class SandboxEnvironment(BaseEnvironment):  # type: ignore[misc]  # the package is not here
    """The environment of one trial. `settings` are those of ``env.NAME.harbor``."""

    def __init__(self, *args: Any, settings: dict[str, Any], **kwargs: Any) -> None:
        """Read what the task needs. Raises `TaskRefused` for what is not there."""
        self._settings = settings
        self._enclosed: EnclosedSandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Return what Harbor calls it in errors."""
        return "sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Return what Harbor may ask for."""
        return EnvironmentCapabilities(disable_internet=True)

    @property
    def is_lost(self) -> bool:
        """Whether its sandbox has ended before it was to."""
        return self._enclosed is not None and self._enclosed.is_lost

    def _validate_definition(self) -> None:
        """Read the Dockerfile. Raises `TaskRefused`."""
        root = self._settings["root"]
        self._root = None if root is None else root.replace(_TASK, self.environment_name)
        self._dockerfile: TaskDockerfile | None = None
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise TaskRefused("its environment has a docker-compose.yaml: there is one sandbox, without services")
        if (self.environment_dir / "Dockerfile").exists():
            self._dockerfile = TaskDockerfile(
                self.environment_dir, runs_are_done=root is not None, copies_are_done=_TASK in (root or "")
            )
        elif self.task_env_config.docker_image is None:
            raise TaskRefused("its environment has neither a Dockerfile nor a docker_image")
        elif root is None:
            raise TaskRefused(
                f"it needs the image {self.task_env_config.docker_image}: name a prepared root file system (root)"
            )
        if self._root is not None:
            check_root(Path(self._root))

    async def start(self, force_build: bool) -> None:
        """Make the sandbox, and copy there what the Dockerfile says."""
        has_network = self._settings["network"] and self.network_policy.network_mode == NetworkMode.PUBLIC
        storage_bytes = (self._effective_storage_mb or self._settings["storage_mb"]) << 20
        self._enclosed = EnclosedSandbox(
            {
                "root": None if self._root is None else os.path.abspath(self._root),
                "paths": [os.path.abspath(path) for path in self._settings["paths"]],
                "network": has_network,
                "storage_bytes": storage_bytes,
                "storage_files": max(10_000, storage_bytes >> 12),
                "folders": _FOLDERS,
                "limits": {
                    "DATA": (self._effective_memory_mb or self._settings["memory_mb"]) << 20,
                    "NPROC": self._settings["processes"],
                    "FSIZE": storage_bytes + _ARCHIVE_BYTES,
                    "NOFILE": 4096,
                    "CORE": 0,
                },
            }
        )
        await self._enclosed.begin()
        await self._enclosed.upload(self._workdir, lambda files: None)
        for copying in () if self._dockerfile is None else self._dockerfile.copies:
            for source in copying.sources:
                if source.is_dir():
                    await self._put(source, PurePosixPath(copying.target), copying.mode)
                else:
                    into = PurePosixPath(copying.target) / (source.name if copying.is_into_folder else "")
                    await self._put(source, into, copying.mode)
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """End the sandbox."""
        if self._enclosed is not None:
            await self._enclosed.end()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command of the shell."""
        if self._resolve_user(user) not in ROOT_USERS:
            raise TaskRefused(f"user {self._resolve_user(user)}: a sandbox has no other than root")
        variables = {"PATH": _PATH, "HOME": _HOME, "HOSTNAME": "sandbox"}
        variables |= {} if self._dockerfile is None else self._dockerfile.env
        variables |= self._merge_env(env) or {}
        try:
            ended = await self._sandbox.run(["/bin/bash", "-c", command], variables, cwd or self._workdir, timeout_sec)
        except TimeoutError:
            ended = EndedCommand(_TIME_IS_UP, "", f"the command took longer than {timeout_sec} s")
        if callback := self._output_callback():
            for text, name in ((ended.output, "stdout"), (ended.errors, "stderr")):
                if text:
                    await callback(text, name)
        return ExecResult(stdout=ended.output, stderr=ended.errors, return_code=ended.code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Write a file there."""
        await self._put(Path(source_path).resolve(), PurePosixPath(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Write what a folder has there."""
        await self._put(Path(source_dir), PurePosixPath(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Read a file from there."""
        async with self._sandbox.download(source_path) as files:
            content = files.extractfile(files.getmember("."))
            if content is None:
                raise FileNotFoundError(f"{source_path} is not there as a file")
            Path(target_path).parent.mkdir(parents=True, exist_ok=True)
            with Path(target_path).open("wb") as file:
                shutil.copyfileobj(content, file)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Read what a folder has from there."""
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        async with self._sandbox.download(source_dir) as files:
            files.extractall(target_dir, filter=transfer_tar_filter)

    @property
    def _sandbox(self) -> EnclosedSandbox:
        assert self._enclosed is not None, "it has been started"
        return self._enclosed

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or ("/" if self._dockerfile is None else self._dockerfile.workdir)

    async def _put(self, source: Path, target: PurePosixPath, mode: int | None = None) -> None:
        """Write a file, or what a folder has, at a path there."""

        def fill(files: tarfile.TarFile) -> None:
            for path in sorted(source.iterdir()) if source.is_dir() else ():
                add_to(files, path, path.name, mode)
            if not source.is_dir():
                add_to(files, source, target.name, mode)

        await self._sandbox.upload(str(target if source.is_dir() else target.parent), fill)


def check_root(folder: Path) -> None:
    """Raise `TaskRefused` unless a folder has a root file system that a sandbox may change its copy of."""
    if not (folder / "bin").exists():
        raise TaskRefused(f"root: {folder} has no root file system: it has no bin")
    user = os.geteuid() or enclose.NOBODY
    if folder.stat().st_uid != user or (folder / "bin/.").stat().st_uid != user:
        raise TaskRefused(f"root: {folder} must belong to the sandbox's root: chown -R -h {user}:{user} {folder}")
