// Features that only a device has: dynamic shared memory, and launches before the previous kernel has ended
// (launch.py).

extern __shared__ uint4 shared_memory[];

// After this call, what the previous kernel wrote can be read. All threads must call it.
__device__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel be launched. It must wait itself before it reads.
__device__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
