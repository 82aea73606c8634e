"""Build the wheel, install it alone into a clean environment, import its modules, and run ``coordinator --help``.

The dependencies come from the environment that runs this, so nothing is downloaded twice.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Imported only where these are: Triton comes with torch for CUDA, vLLM imports the worker by its name, and others are
# of extras.
NEEDS = {
    "tandem.refit.gpu_kernels": "triton",
    "tandem.rollout.engines.vllm.worker": "vllm",
    "tandem.observe.exporters.prometheus": "prometheus_client",
    "tandem.observe.exporters.tracing": "opentelemetry",
    "tandem.samples.packaged_environments.programs.tandem_chat": "verifiers",
    # Programs of an interpreter that has Harbor, which find each other in their own folder.
    "tandem.samples.packaged_environments.programs.enclosed": "harbor",
    "tandem.samples.packaged_environments.programs.harbor_sandbox": "harbor",
}


def main() -> None:
    """Raise if the wheel is not whole."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)], check=True, timeout=300
        )
        (wheel,) = folder.glob("*.whl")
        modules = modules_of(wheel)
        check_nothing_is_missing(modules)
        check_page(wheel)
        venv.create(folder / "venv", with_pip=False)
        python = folder / "venv" / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
        subprocess.run(pip, check=True, timeout=300)
        # A path file lends the dependencies; the editable install is not among them, because it is a path file itself.
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        environment = {"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": "/usr/bin:/bin"}
        importable = [name for name in modules if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
        code = f"import importlib\nfor name in {importable!r}: importlib.import_module(name)\n"
        code += "import tandem\nassert callable(tandem.train)\n"
        code += "from importlib.metadata import version\nassert tandem.__version__ == version('tandem-rl')\n"
        code += "from tandem.common.distribution import install_command\n"
        code += """assert install_command("vllm") == "pip install 'tandem-rl[vllm]'", install_command("vllm")\n"""
        code += (
            f"import tandem.common\nassert tandem.common.__file__.startswith({str(site)!r}), tandem.common.__file__\n"
        )
        subprocess.run([str(python), "-c", code], check=True, timeout=300, cwd=scratch, env=environment)
        command = folder / "venv" / "bin" / "coordinator"
        subprocess.run([str(command), "--help"], check=True, timeout=60, cwd=scratch, env=environment)
        print(f"{wheel.name}: {len(importable)} of {len(modules)} modules import")
        for name in sorted(set(modules) - set(importable)):
            print(f"not imported: {name}, which needs {NEEDS[name]}")


def modules_of(wheel: Path) -> list[str]:
    """Return the dotted names of the modules in a wheel."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    return sorted(name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names)


def check_nothing_is_missing(modules: list[str]) -> None:
    """Compare with the source tree."""
    sources = [path for part in ("libs", "services") for path in ROOT.glob(f"{part}/*/src/tandem/**/*.py")]
    assert len(modules) == len(sources), f"{len(sources)} modules in the source tree, {len(modules)} in the wheel"


def check_page(wheel: Path) -> None:
    """Compare the files that the page is made of with the source tree."""
    root = ROOT / "libs" / "observe" / "src"
    names = {str(path.relative_to(root)) for path in root.glob("tandem/observe/page/static/**/*") if path.is_file()}
    assert names, "the page has no files"
    missing = names - set(zipfile.ZipFile(wheel).namelist())
    assert not missing, f"not in the wheel: {sorted(missing)}"


if __name__ == "__main__":
    main()
