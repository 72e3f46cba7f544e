// Operations of the blocks of a cluster, which can read each other's shared memory.

__device__ u32 block_of_cluster() {
  u32 block;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
  return block;
}

// The two halves of a barrier of the cluster. The wait returns when all threads of the cluster have arrived; their earlier
// writes are then visible.
__device__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Reads the shared memory of another block, at the address of `mine` in this block.
__device__ u32 read_of_block(const u32 *mine, u32 block) {
  u32 here = static_cast<u32>(__cvta_generic_to_shared(mine)), there, value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
}
