"""Serving engines: what each can run of a stack, and the command lines that start it. To add an engine, add a file and
a line here."""

from epsim.engines.base import System
from epsim.engines.sglang import SGLang
from epsim.engines.vllm import VLLM

SYSTEMS: tuple[System, ...] = (SGLang(), VLLM())
