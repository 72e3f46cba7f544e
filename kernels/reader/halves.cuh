// Half precision that CUDA C++ has no words for without its own headers.

// sum [16, 8] += a [16, 16] b [16, 8] in fp16, spread over a warp. Subnormal values count as what they are.
__device__ __forceinline__ void multiply_halves(float4 &sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u16 to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float from_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Four bytes to shared memory, there after `copied`.
__device__ __forceinline__ void copy_word(u32 *to, const u8 *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address(to)), "l"(from) : "memory");
}

// This thread's copies are there, and its warp's.
__device__ __forceinline__ void copied() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
}
