// Operations between blocks of a cluster, and between kernels that follow each other.

// Waits until the previous kernel has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel begin. Before that kernel reads results, it must call wait_for_previous_kernel.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)

// The two halves of a barrier of the cluster: writes before the arrival are visible to all threads after the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Sets bits in the word at the same address in another block's shared memory, with an atomic or.
__device__ __forceinline__ void or_into_block(unsigned &word, int block, unsigned bits) {
    const unsigned here = (unsigned)__cvta_generic_to_shared(&word);
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n red.shared::cluster.or.b32 [there], %2;\n}"
        ::"r"(here), "r"(block), "r"(bits) : "memory");
}

// Adds a number to the word at the same address in another block's shared memory.
__device__ __forceinline__ void add_into_block(unsigned &word, int block, unsigned more) {
    const unsigned here = (unsigned)__cvta_generic_to_shared(&word);
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n red.shared::cluster.add.u32 [there], %2;\n}"
        ::"r"(here), "r"(block), "r"(more) : "memory");
}

__device__ __forceinline__ void add_into_block(unsigned long long &word, int block, unsigned long long more) {
    const unsigned here = (unsigned)__cvta_generic_to_shared(&word);
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n red.shared::cluster.add.u64 [there], %2;\n}"
        ::"r"(here), "r"(block), "l"(more) : "memory");
}
#else
#define CLUSTERED
__device__ __forceinline__ void cluster_arrive() {}

__device__ __forceinline__ void cluster_wait() {}

__device__ __forceinline__ void or_into_block(unsigned &, int, unsigned) {}

__device__ __forceinline__ void add_into_block(unsigned &, int, unsigned) {}

__device__ __forceinline__ void add_into_block(unsigned long long &, int, unsigned long long) {}
#endif
