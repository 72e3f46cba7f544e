// Inline PTX for instructions of the readers that CUDA C++ lacks, or offers only in its own headers.

// Programmatic dependent launch: a kernel may begin before the previous one has ended. The first function waits until it
// has ended and its writes are visible; the second lets the next kernel begin.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// sum [16, 8] += a [16, 16] b [16, 8] in fp16, distributed over the lanes of a warp. Subnormal values are kept.
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

// Operations on two halves; subnormal values are kept.
__device__ __forceinline__ u32 times_halves(u32 one, u32 other) {
    u32 products;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(products) : "r"(one), "r"(other));
    return products;
}

// A third of each half, rounded to an integer in units of 2^-24, the smallest fp16.
__device__ __forceinline__ u32 thirds(u32 halves) { return times_halves(halves, 0x35553555); }

// Converts two bytes of packed codes (codes.py) to fp16 integers in units of 2^-24. Each byte is given twice, in both bytes
// of a half: its upper bit becomes the sign, its lower 7 bits the mantissa.
__device__ __forceinline__ u32 code_sums(u32 bytes) { return bytes & 0x807f807fu; }

// Copies 16 bytes to shared memory, bypassing L1.
__device__ __forceinline__ void copy_16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}

// Ends a group of this thread's asynchronous copies.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread's copies, except the last LATER.
template <int LATER> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Waits for all of this thread's copies.
__device__ __forceinline__ void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Orders the copy engine's writes after the threads' earlier accesses to shared memory.
__device__ __forceinline__ void fence_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Packs a number and the tag of the launch into one word, so that a block that polls the word sees whether it has arrived.
__device__ __forceinline__ u64 tagged(u32 bits, u32 tag) { return (u64)tag << 32 | bits; }

__device__ __forceinline__ void put_tagged(u64 *at, u32 bits, u32 tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(tagged(bits, tag)) : "memory");
}

__device__ __forceinline__ void put_two_tagged(u64 *at, float one, float other, u32 tag) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};"
        ::"l"(at), "l"(tagged(__float_as_int(one), tag)), "l"(tagged(__float_as_int(other), tag)) : "memory");
}

__device__ __forceinline__ void get_two_tagged(const u64 *at, u64 &one, u64 &other) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(one), "=l"(other) : "l"(at) : "memory");
}

__device__ __forceinline__ u64 get_tagged(const u64 *at) {
    u64 now;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(at) : "memory");
    return now;
}
