// Inline PTX for Hopper instructions that CUDA C++ lacks.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Initializes a barrier in shared memory. A phase is complete after `arrivals` arrivals and all bytes that they announce.
__device__ __forceinline__ void init_barrier(u64 &barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until the barrier's phase of this parity is complete.
__device__ __forceinline__ void wait(u64 &barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra again;\n}" ::"r"(address(&barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u64 &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}

__device__ __forceinline__ void arrive_expecting(u64 &barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes) : "memory");
}

// A cache policy for data that is not read again: L2 evicts it first.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copies from global to shared memory with the copy engine; addresses and size are multiples of 16.
__device__ __forceinline__ void copy_in(void *to, const void *from, u32 bytes, u64 &barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(&barrier)), "l"(policy) : "memory");
}

// A barrier of the block's first `threads` threads.
__device__ __forceinline__ void sync_threads(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

__device__ __forceinline__ u64 load_acquire(const u64 *at) {
    u64 now;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(at) : "memory");
    return now;
}

// sum [16, 8] += a [16, 16] b [16, 8] in bf16, distributed over the lanes of a warp.
__device__ __forceinline__ void multiply(float4 &sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u16 rounded(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
