# SPDX-License-Identifier: Apache-2.0
"""Run the native backend's Python tests with the core under AddressSanitizer.

    python tools/sanitize_python.py [--build DIR] [pytest arguments]

The sanitizers of `make sanitize` see the core without Python. This builds the extension itself with ASan, puts it into
a copy of the package, preloads the sanitizer's runtime (Python is not linked with it) and runs the tests of the
operators on it. Leaks are not looked for: an interpreter ends with objects alive. The first report ends the run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/test_native.py", "tests/test_native_operator.py", "tests/test_native_index.py")
# Tests of the build itself, which look at object files and start compilers, and one of memory: the sanitizer keeps it.
NOT_THE_CORE = "not target_file and not emulated and not address_sanitizer and not memory_stays_flat"


def build(directory: Path) -> Path:
    """The extension with ASan, built without changing the installed one."""
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    flags = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address"
    options = ["-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={flags}", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(directory), *options],
        [cmake, "--build", str(directory), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return next(directory.glob("_native*.so"))


def runtimes() -> str:
    """The libraries to preload: ASan's must come first, and it needs libstdc++ to follow exceptions."""
    compiler = os.environ.get("CXX", "g++")
    names = ("libasan.so", "libstdc++.so")
    return " ".join([subprocess.check_output([compiler, f"-print-file-name={n}"], text=True).strip() for n in names])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "asan-python", help="where to build")
    options, arguments = parser.parse_known_args()
    extension = build(options.build)
    package = options.build / "site" / "sparse_mla"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "sparse_mla", package, ignore=shutil.ignore_patterns("_native*.so", "__pycache__"))
    shutil.copy(extension, package)
    # An editable install finds its package by an import hook that precedes the path: it has to go first.
    start = (
        "import sys, pytest\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        f"sys.path.insert(0, {str(package.parent)!r})\n"
        "import sparse_mla._native as native\n"
        f"assert native.__file__.startswith({str(package.parent)!r}), native.__file__\n"
    )
    tests = "sys.exit(pytest.main(sys.argv[1:]))\n"
    # A record read past the end of its memory: without a report here, silence later means nothing.
    mistake = (
        "import torch\n"
        "record, out = torch.zeros(100, dtype=torch.uint8), torch.zeros(512)\n"
        "native.decode_record(len(native.targets()) - 1, 0, record.data_ptr(), record.data_ptr(), out.data_ptr())\n"
    )
    environment = os.environ | {
        "LD_PRELOAD": runtimes(),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=0",
        "PYTHONPATH": str(package.parent),
    }
    chosen = arguments or [
        "-q",
        "-x",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-m",
        "not full",
        "-k",
        NOT_THE_CORE,
        *TESTS,
    ]
    seen = subprocess.run(
        [sys.executable, "-c", start + mistake], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if "heap-buffer-overflow" not in seen.stderr:
        print(f"AddressSanitizer does not see a read past the end of a tensor; it said: {seen.stderr[-2000:]!r}")
        return 1
    return subprocess.run([sys.executable, "-c", start + tests, *chosen], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
