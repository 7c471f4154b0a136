# SPDX-License-Identifier: Apache-2.0
"""The simulator's surface against the stored documented API: names, parameter order, defaults, enumeration values."""

from __future__ import annotations

import inspect
import json
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparse_mla import simulator
from sparse_mla.errors import NotSimulatedError
from sparse_mla.simulator import isa as nisa
from sparse_mla.simulator import language as nl
from sparse_mla.simulator.operators import Operator
from sparse_mla.simulator.tensor import NkiTensor

from .kit import launch

API = json.loads((Path(__file__).parent.parent / "data" / "nki_api.json").read_text())["api"]
ISA = API["nki.isa"]["functions"]
LANGUAGE = API["nki.language"]["functions"]
UNDOCUMENTED_DEFAULT = "..."
OLDER_PARAMETERS = {("register_move", "imm")}  # accepted with a warning, or optional where the stub asks for it
NOT_SIMULATED = ("activate2", "exponential", "nc_matmul_mx", "quantize_mx")


def shown(value: Any) -> str:
    """A default as the documentation writes it."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}" if type(value).__name__ != "MemoryRegion" else value.name
    if isinstance(value, Operator):
        return value.name
    return str(value) if type(value).__name__ == "DType" else repr(value)


def parameters(function: Any) -> list[list[str]]:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        name = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
        entry = [name + parameter.name]
        if parameter.default is not inspect.Parameter.empty:
            entry.append(shown(parameter.default))
        found.append(entry)
    return found


@pytest.mark.parametrize("name", ISA)
def test_isa_signature(name: str) -> None:
    ours = parameters(getattr(nisa, name))
    ours = [p for p in ours if (name, p[0]) not in OLDER_PARAMETERS]
    theirs = ISA[name]
    assert [p[0] for p in ours] == [p[0] for p in theirs]
    for mine, documented in zip(ours, theirs, strict=True):
        if documented[1:] == [UNDOCUMENTED_DEFAULT] or ((name, "imm") in OLDER_PARAMETERS and mine[0] == "src"):
            continue
        assert mine == documented, name


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_signature(name: str) -> None:
    function = getattr(nl, name)
    if isinstance(function, Operator):
        documented = [p[0] for p in LANGUAGE[name]]
        assert documented == (["x", "dtype"] if function.arity == 1 else ["x", "y", "dtype"])
        return
    if inspect.isclass(function):
        assert LANGUAGE[name] == []
        return
    assert parameters(function) == LANGUAGE[name]


@pytest.mark.parametrize("name", [n for n in API["nki.language"]["NkiTensor"] if n != "__init__"])
def test_tensor_method_signature(name: str) -> None:
    ours, theirs = parameters(getattr(NkiTensor, name)), API["nki.language"]["NkiTensor"][name]
    if name == "reshape":  # also takes the sizes one by one
        assert ours == [["self"], ["*shape"]]
        return
    assert ours == theirs


def test_enumerations() -> None:
    for name, members in API["nki.isa"]["enums"].items():
        assert {m.name: m.value for m in getattr(nisa, name)} == members


def test_names_and_tile_sizes() -> None:
    for name in API["nki.language"]["names"]:
        assert hasattr(nl, name), name
    for name in API["nki.language"]["tile_size"]:
        assert isinstance(getattr(nl.tile_size, name), int), name
    with pytest.raises(AttributeError):
        nl.tile_size.pmin  # noqa: B018


def test_every_instruction_is_exported() -> None:
    for name in ISA:
        assert name in nisa.__all__ or name.startswith("get_nc"), name


@pytest.mark.parametrize("name", NOT_SIMULATED)
def test_missing_instructions_say_their_name(name: str) -> None:
    count = sum(1 for p in ISA[name] if len(p) == 1)

    def kernel() -> None:
        getattr(nisa, name)(*[None] * count)

    with pytest.raises(NotSimulatedError, match=rf"nisa\.{name}.*test_api\.py:\d+"):
        launch(kernel)


def test_collectives_refuse_by_name() -> None:
    from sparse_mla.simulator import collectives

    with pytest.raises(NotSimulatedError, match="all_reduce"):
        collectives.all_reduce([], [], None)


def test_install_provides_the_modules_and_uninstall_restores() -> None:
    before = {n: m for n, m in sys.modules.items() if n == "nki" or n.startswith(("nki.", "neuronxcc"))}
    simulator.uninstall()
    broken = types.ModuleType("nki")  # a package without jit counts as absent
    sys.modules["nki"] = broken
    try:
        assert simulator.install(neuronxcc=True)
        import neuronxcc.nki.typing as nt  # type: ignore[import-not-found]
        import nki  # type: ignore[import-not-found]
        import nki.isa.constants  # type: ignore[import-not-found]
        import nki.language  # type: ignore[import-not-found]
        from nki.collectives import ReplicaGroup  # type: ignore[import-not-found]

        assert nki.language is nl
        assert nki.isa is nisa
        assert nki.isa.constants.oob_mode is nisa.oob_mode
        assert nt.tensor[(128, 64)] is nt.tensor
        assert ReplicaGroup([[0, 1]]).args == ([[0, 1]],)
        simulator.uninstall()
        assert sys.modules["nki"] is broken
        assert "nki.language" not in sys.modules
    finally:
        simulator.uninstall()
        for name in [n for n in sys.modules if n == "nki" or n.startswith(("nki.", "neuronxcc"))]:
            del sys.modules[name]
        sys.modules.update(before)


def test_the_real_package_is_left_alone() -> None:
    before = {n: m for n, m in sys.modules.items() if n == "nki" or n.startswith("nki.")}
    simulator.uninstall()
    real = types.ModuleType("nki")
    real.jit = lambda f: f  # type: ignore[attr-defined]
    sys.modules["nki"] = real
    try:
        assert not simulator.install()
        assert sys.modules["nki"] is real
        assert simulator.install(force=True)
        assert sys.modules["nki"] is not real
    finally:
        simulator.uninstall()
        sys.modules.pop("nki", None)
        sys.modules.update(before)


def test_dtypes_compare_by_identity_and_text() -> None:
    def kernel(x: Any) -> None:
        assert x.dtype is nl.bfloat16
        assert x.dtype == "bfloat16"
        assert str(x.dtype) == str(nl.bfloat16)
        assert x.buffer in (nl.hbm, nl.shared_hbm, nl.private_hbm)
        assert x.buffer == "shared_hbm"

    launch(kernel, np.zeros((4, 4), np.dtype("bfloat16")))


def test_old_names_are_accepted_and_noted() -> None:
    def kernel() -> None:
        t = nl.ndarray((4, 8), nl.float32)
        nisa.memset(dst=t, value=0.0, engine=nisa.vector_engine)
        assert nl.tile_size.psum_fmax == nl.tile_size.psum_bank_fmax
        register = nisa.register_alloc()
        nisa.register_move(register, imm=3)
        assert register.state == 3
        out = nl.ndarray((4, 1), nl.float32)
        nisa.tensor_reduce(dst=out, op=nl.max, data=t, axis=1)

    texts = [w.message for w in launch(kernel).warnings]
    for word in ("vector_engine is now", "psum_fmax is now", "imm=) is now", "nl.max as an operator"):
        assert any(word in text for text in texts), texts


def test_removed_arguments_say_what_to_do() -> None:
    def kernel() -> None:
        t = nl.ndarray((4, 8), nl.float32)
        nisa.memset(dst=t, value=0.0)
        nisa.tensor_copy(dst=t, src=t, dtype=nl.float32)

    with pytest.raises(simulator_error(), match=r"tensor_copy.*declare the dst tile"):
        launch(kernel)


def simulator_error() -> type[Exception]:
    from sparse_mla.errors import KernelError

    return KernelError
