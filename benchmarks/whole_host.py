"""The runtime on all GPUs of a host: `python benchmarks/whole_host.py --help`. See benchmarks/whole_host/run.py."""

from whole_host.run import main

if __name__ == "__main__":
    main()
