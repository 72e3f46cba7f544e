// Features that the host emulation replaces: dynamic shared memory and programmatic dependent launch (see launch.py).

extern __shared__ uint4 shared_memory[];

// Waits until the previous kernel has ended and its writes are visible. All threads must call it.
__device__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel begin. Before that kernel reads results, it must call wait_for_previous_kernel.
__device__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
