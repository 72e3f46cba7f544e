"""Micro-benchmarks of the machine at hand, as tables that `epsim replay --hardware DIR` reads."""
