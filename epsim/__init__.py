"""epsim: which expert-parallel load-balancing policy makes the slowest rank least slow?"""

__version__ = "0.1.0"
