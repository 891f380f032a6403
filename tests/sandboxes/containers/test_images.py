from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dockerd import BARE, IMAGE, Dockerd, write_root
from turnstile.errors import ConfigError, DaemonError
from turnstile.sandboxes.containers.daemon import Daemon
from turnstile.sandboxes.containers.images import DEPENDENCIES, Images, ImageStep, pull_error
from turnstile.sandboxes.containers.provider import ContainerSandboxes
from turnstile.sandboxes.containers.repository import git, past

Make = Callable[..., ContainerSandboxes]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def steps() -> list[ImageStep]:
    return []


@pytest.fixture
def images(engine: Dockerd, steps: list[ImageStep]) -> Iterator[Images]:
    """The images of the engine; those made are removed."""
    daemon = Daemon(engine.address)
    made = Images(daemon, steps.append)
    yield made
    assert made.remove(made.kept()) == []
    daemon.close()


async def test_a_repository_is_put_into_an_image(
    images: Images, containers: Make, template: Path, tmp_path: Path
) -> None:
    git(template, "init", "--quiet")
    git(template, "commit", "--allow-empty", "--quiet", "-m", "the answer")
    deps = tmp_path / "deps"
    (deps / "helper").mkdir(parents=True)
    (deps / "helper" / "__init__.py").write_text("help = 'given'\n")
    image = images.with_repository(IMAGE, template, holds="Tiny 1.0", deps=deps)
    assert image.name.startswith("localhost/turnstile/tiny-1-0:")
    provider = containers()
    sandbox = await provider.start(image)
    shown = await sandbox.exec(["ls", "-a"])
    assert shown.stdout.split() == [".", "..", ".git", "pkg", "run.sh"]
    assert (await sandbox.exec(["./run.sh"])).stdout == "ran\n"
    # It is the sandbox user's: to be changed and committed to, as an agent does.
    assert (await sandbox.exec(["sh", "-c", "touch new .git/new pkg/new && rm run.sh"])).exit_code == 0
    told = await sandbox.exec(["python", "-c", "import helper; print(helper.__file__)"], env={"PYTHONPATH": "pkg"})
    assert told.stdout == f"{DEPENDENCIES}/helper/__init__.py\n"
    # What is in the container has no past.
    fresh = await provider.start(image)
    with (tmp_path / "repository.tar").open("wb") as file:
        identity = fresh.container.identity
        archive, _ = provider.daemon.client.get_archive(identity, image.root)
        file.writelines(archive)
    with tarfile.open(tmp_path / "repository.tar") as packed:
        packed.extractall(tmp_path / "seen", filter="data")
    assert past(tmp_path / "seen" / "testbed") == []


def test_what_is_there_is_not_made_again(images: Images, steps: list[ImageStep], template: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: images.with_repository(IMAGE, template), range(4)))
    assert made == made[:1] * 4
    assert len({step.what for step in steps}) == 1
    assert steps[-1].total is not None
    assert steps[-1].done == steps[-1].total - 1
    (template / "run.sh").chmod(0o644)
    assert images.with_repository(IMAGE, template) != made[0]
    (template / "pkg" / "__init__.py").write_text("answer = 43\n")
    assert images.with_repository(IMAGE, template, user="0:0") != made[0]
    assert len(images.kept()) == 3


async def test_an_image_is_made_by_a_dockerfile(images: Images, containers: Make, template: Path) -> None:
    dockerfile = template / "Recipe"
    dockerfile.write_text(f"FROM {IMAGE}\nCOPY . /given\nENV PLACE=/given\n")
    (template / ".dockerignore").write_text("# not needed\npkg\n")
    name = images.from_dockerfile(dockerfile)
    (template / "pkg" / "__init__.py").write_text("not sent\n")
    assert images.from_dockerfile(dockerfile) == name
    provider = containers(image="", dockerfile=dockerfile)
    assert provider.spec.image == name
    sandbox = await provider.start(template)
    assert (await sandbox.exec(["sh", "-c", "ls $PLACE"])).stdout.split() == ["Recipe", "run.sh"]
    dockerfile.write_text(f"FROM {IMAGE}\nCOPY nothing /\n")
    with pytest.raises(ConfigError, match=r"Recipe makes\): .*nothing"):
        images.from_dockerfile(dockerfile)


async def test_an_image_is_made_of_a_root_file_system(
    images: Images, containers: Make, template: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "root.tar"
    write_root(archive, python=True)
    sandbox = await containers(image="", rootfs=str(archive)).start(template)
    assert (await sandbox.exec(["./run.sh"])).stdout == "ran\n"
    folder = tmp_path / "folder"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc" / "motto").write_text("mine\n")
    (folder / "etc" / "link").symlink_to("motto")
    name = images.from_root(folder)
    os.chown(folder / "etc" / "motto", 7, 7)
    assert images.from_root(folder) != name
    client = images._client
    made = client.create_container(name, ["none"])["Id"]
    archive_of, _ = client.get_archive(made, "/etc")
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive_of))) as packed:
        assert {"etc/link", "etc/motto"} < set(packed.getnames())
    client.remove_container(made)


def test_packages_are_installed_with_the_images_own_pip(images: Images, template: Path, tmp_path: Path) -> None:
    # A pip that writes down what it is asked for: what installs is not what is tried here.
    (template / "pip.py").write_text("import sys\nopen('/asked', 'w').write(' '.join(sys.argv[1:]))\n")
    dockerfile = template / "Dockerfile"
    dockerfile.write_text(f"FROM {IMAGE}\nENV PYTHONPATH=/lib/own\nCOPY pip.py /lib/own/pip.py\nUSER 1000\n")
    name = images.with_packages(images.from_dockerfile(dockerfile), ["one==1", "two>=2"], network="none")
    client = images._client
    made = client.create_container(name, ["cat", "/asked"])["Id"]
    archive, _ = client.get_archive(made, "/asked")
    assert b"install --no-cache-dir --no-input one==1 two>=2" in b"".join(archive)
    client.remove_container(made)


def test_what_cannot_be_had_says_why(images: Images, template: Path, tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match=r"cannot be reached .*docker pull .*--rootfs"):
        images.pull("localhost:1/there/is:none")
    with pytest.raises(ConfigError, match="make it again"):
        images.pull("localhost/turnstile/gone:1234")
    with pytest.raises(ConfigError, match="there is no Dockerfile"):
        images.from_dockerfile(tmp_path / "Dockerfile")
    with pytest.raises(ConfigError, match="neither a folder nor a tar archive"):
        images.from_root(template / "run.sh")
    with pytest.raises(ConfigError, match="one of three ways"):
        images.base(image=IMAGE, rootfs=tmp_path)
    with pytest.raises(ConfigError, match="there is no source tree"):
        images.with_repository(IMAGE, tmp_path / "none")


async def test_a_sweep_leaves_images_and_a_container_holds_them(
    engine: Dockerd, images: Images, containers: Make, template: Path
) -> None:
    image = images.with_repository(BARE, template)
    with_python = images.with_repository(IMAGE, template)
    provider = containers()
    sandbox = await provider.start(with_python)
    snapshot = await sandbox.snapshot()
    assert await asyncio.to_thread(provider.daemon.sweep) == provider.daemon.find()
    assert {each.name for each in images.kept()} == {image.name, with_python.name}  # and not the snapshot
    assert [each.name for each in images.remove(images.kept())] == [with_python.name]
    await provider.close()
    assert snapshot.name not in engine.images()
    assert {each.name for each in images.kept()} == {with_python.name}


@pytest.mark.parametrize(
    ("why", "error"),
    [
        ("toomanyrequests: You have reached your unauthenticated pull rate limit.", DaemonError),
        ("received unexpected HTTP status: 429 Too Many Requests", DaemonError),
        ("pull access denied for me/none, repository does not exist", ConfigError),
    ],
)
def test_a_registry_that_gives_no_more_is_no_fault_of_the_image(why: str, error: type[Exception]) -> None:
    assert type(pull_error("me/none:1", why)) is error


IN_A_LOOP = """
import asyncio, sys
from pathlib import Path
from turnstile.sandboxes.containers.provider import ContainerSandboxes

async def main():
    ContainerSandboxes(dockerfile=Path(sys.argv[1]), daemon=sys.argv[2])

asyncio.run(main())
"""


@pytest.mark.parametrize("in_a_loop", [True, False])
def test_the_making_of_an_image_is_told_and_can_be_interrupted(
    engine: Dockerd, tmp_path: Path, in_a_loop: bool
) -> None:
    dockerfile = tmp_path / "slow" / "Dockerfile"
    dockerfile.parent.mkdir()
    dockerfile.write_text(f"FROM {IMAGE}\nENV WHICH={in_a_loop}\nRUN sleep 300\n")
    command = [sys.executable, "-u", "-c", IN_A_LOOP, str(dockerfile), engine.address]
    if not in_a_loop:
        command = [sys.executable, "-um", "turnstile", "sandbox", "serve", "container", f"dockerfile={dockerfile}"]
        command += [f"daemon={engine.address}", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        assert told.startswith("making the image localhost/turnstile/slow:")
        assert told.endswith("; this may take minutes\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
        assert "served at" not in process.stdout.read()
