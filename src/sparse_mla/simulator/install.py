# SPDX-License-Identifier: Apache-2.0
"""Making `import nki` work where the real package is absent.

The real package is recognised by `nki.jit` existing. An import that raises, or a package without `jit`, counts as
absent
and is replaced in the module table; `uninstall()` restores what was there.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from . import collectives, compiler, constants, dtypes, isa, language, launch, tensor, typing

__all__ = ["install", "installed", "namespace", "real_nki", "uninstall"]

_before: dict[str, ModuleType | None] = {}


def namespace() -> ModuleType:
    """The `nki` module of the simulator."""
    module = ModuleType("nki", "NKI, executed by the simulator of sparse_mla on this CPU.")
    module.__dict__.update(
        __path__=[], __version__="0.6.0+simulated", jit=launch.jit, simulate=launch.simulate,
        cpu_simulate=launch.cpu_simulate, language=language, isa=isa, typing=typing, compiler=compiler, tensor=tensor,
        dtype=dtypes, collectives=collectives, NKIObject=tensor.NKIObject, Kernel=launch.Kernel,
    )  # fmt: skip
    return module


def _modules() -> dict[str, Any]:
    return {
        "nki": namespace(),
        "nki.language": language,
        "nki.isa": isa,
        "nki.isa.constants": constants,
        "nki.typing": typing,
        "nki.compiler": compiler,
        "nki.tensor": tensor,
        "nki.dtype": dtypes,
        "nki.collectives": collectives,
    }


def real_nki() -> ModuleType | None:
    """The real package, or None when it is absent or broken."""
    found = sys.modules.get("nki")
    if installed():
        return None
    if found is None:
        try:
            found = importlib.import_module("nki")
        except Exception:  # whatever its import raises: it is not usable
            return None
    return found if hasattr(found, "jit") else None


def installed() -> bool:
    """True while the module table holds the simulator."""
    return bool(_before) and sys.modules.get("nki.language") is language


def install(*, force: bool = False, neuronxcc: bool = False) -> bool:
    """Register the simulator as `nki` unless the real package is there; True when imports give the simulator.

    Args:
        force: replace the real package too.
        neuronxcc: also provide `neuronxcc.nki.typing`, which some third-party files still import.
    """
    if installed():
        return True
    if not force and real_nki() is not None:
        return False
    modules = _modules()
    if neuronxcc:
        outer, inner = ModuleType("neuronxcc"), ModuleType("neuronxcc.nki")
        outer.__dict__.update(__path__=[], nki=inner)
        inner.__dict__.update(__path__=[], typing=typing)
        modules |= {"neuronxcc": outer, "neuronxcc.nki": inner, "neuronxcc.nki.typing": typing}
    stale = [name for name in sys.modules if name == "nki" or name.startswith("nki.")]
    for name in {*modules, *stale}:
        _before[name] = sys.modules.get(name)
    for name in stale:
        del sys.modules[name]
    sys.modules.update(modules)
    return True


def uninstall() -> None:
    """Restore the module table `install` found."""
    for name, module in _before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _before.clear()
