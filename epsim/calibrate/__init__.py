"""Micro-benchmarks of this machine, written as tables that `epsim replay --hardware DIR` reads."""
