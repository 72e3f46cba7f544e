// What only a device has: shared memory of a launch's size, and kernels that may be launched before the one before them
// has ended (launch.py).

extern __shared__ uint4 shared_memory[];

// What the kernel before this one wrote is there from here on. All threads must come.
__device__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may be launched, if it waits itself.
__device__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
