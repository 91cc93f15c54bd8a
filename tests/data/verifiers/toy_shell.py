"""A taskset whose own harness wants a container."""

import verifiers.v1 as vf
from toy_program import ProgramHarness, ProgramTaskset

__all__ = ["ShellHarness", "ShellTaskset"]


class ShellTaskset(ProgramTaskset):
    pass


class ShellHarness(ProgramHarness, vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = True
