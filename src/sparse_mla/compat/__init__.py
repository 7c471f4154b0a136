# SPDX-License-Identifier: Apache-2.0
"""Drop-ins: upstream names and signatures over this library's operators.

`install("flash_mla", ...)` puts them where `import flash_mla` finds them, for engines that import the originals. Only
this call touches `sys.modules`. Upstream signatures cannot say in which layout a main cache is written, so
`install(layout=, e4m3_max=)` does, or SPARSE_MLA_LAYOUT and SPARSE_MLA_E4M3_MAX.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from .. import config
from ..errors import ArgumentError, SparseMlaError

__all__ = ["MODULES", "cache_e4m3_max", "cache_layout", "install", "renamed", "uninstall"]

MODULES = ("flash_mla", "deep_gemm", "deep_select")

# Submodules that engines import by their full name, beside the package.
_ALIASES = {"flash_mla": ("flash_mla.flash_mla_interface",)}

_LAYOUTS = ("interleaved", "planar")
_CAPS = (448, 224)
_chosen_layout: str | None = None
_chosen_cap: int | None = None


def install(*names: str, layout: str | None = None, e4m3_max: int | None = None) -> None:
    """Make `import flash_mla`, `import deep_gemm` and `import deep_select` give this library's drop-ins.

    Args:
        names: which of them; none means all. Either all named are installed or none is. Installing again is allowed.
        layout: "interleaved" or "planar", how the main caches given to the drop-ins are written. None:
            SPARSE_MLA_LAYOUT at each call.
        e4m3_max: 448 or 224, the cap they are written with. None: SPARSE_MLA_E4M3_MAX at each call.
    Raises:
        ArgumentError: an unknown name or option, or the real package is installed or imported; nothing has been changed
            then.
    """
    global _chosen_layout, _chosen_cap
    wanted = names or MODULES
    for name in wanted:
        if name not in MODULES:
            raise ArgumentError(f"compat.install: names must be of {', '.join(MODULES)}, got {name!r}.")
        _require_absent(name)
    if layout is not None and layout not in _LAYOUTS:
        raise ArgumentError(f"compat.install: layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}.")
    if e4m3_max is not None and e4m3_max not in _CAPS:
        raise ArgumentError(f"compat.install: e4m3_max must be 448 or 224, got {e4m3_max!r}.")
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in wanted}
    for name, module in modules.items():
        for key in (name, *_ALIASES.get(name, ())):
            sys.modules[key] = module
    _chosen_layout, _chosen_cap = layout, e4m3_max


def uninstall() -> None:
    """Take the drop-ins out of `sys.modules` again and forget the options given to `install`; for tests."""
    global _chosen_layout, _chosen_cap
    for name in MODULES:
        for key in (name, *_ALIASES.get(name, ())):
            if _is_ours(sys.modules.get(key)):
                del sys.modules[key]
    _chosen_layout = _chosen_cap = None


@config.constant_in_graphs
def cache_layout() -> str:
    """Layout of the main caches given to the drop-ins; a compiled graph keeps the value it was traced with."""
    return str(config.get("SPARSE_MLA_LAYOUT")) if _chosen_layout is None else _chosen_layout


@config.constant_in_graphs
def cache_e4m3_max() -> int:
    """e4m3 cap of the main caches given to the drop-ins; a compiled graph keeps the value it was traced with."""
    return int(config.get("SPARSE_MLA_E4M3_MAX")) if _chosen_cap is None else _chosen_cap


def renamed(error: SparseMlaError, names: dict[str, str]) -> SparseMlaError:
    """The same error in the caller's words: each operator or argument name of `names` replaced by the drop-in's."""
    text = str(error)
    for ours, theirs in names.items():
        text = text.replace(ours, theirs)
    return type(error)(text)


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and getattr(module, "__name__", "").startswith(f"{__name__}.")


def _require_absent(name: str) -> None:
    module = sys.modules.get(name)
    if _is_ours(module):
        return
    if name in sys.modules:
        raise ArgumentError(
            f"compat.install: {name} must not be imported yet, got the one from {getattr(module, '__file__', None)}; "
            "install the drop-in before anything imports the original."
        )
    spec = importlib.util.find_spec(name)
    if spec is not None:
        raise ArgumentError(
            f"compat.install: {name} must not be installed, got the one in {spec.origin}; remove it, or import "
            f"sparse_mla.compat.{name} instead."
        )
