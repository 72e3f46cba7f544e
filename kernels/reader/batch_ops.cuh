// Instructions of the batch's reader that CUDA C++ has no words for.

// Two numbers n of 0 to 255, each as the half 1024 + n -> 1024 + n / 3, rounded down. In fp16 a sum from 1024 on is
// rounded to a whole number: n / 3 - 1 / 4 to the nearest is n / 3 rounded down, with room for 1/3's own rounding.
__device__ __forceinline__ u32 thirds(u32 halves) {
    u32 found;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(halves), "r"(0x35553555u), "r"(0x61556155u));
    return found;
}

// Sixteen bytes of weights, which no kernel writes, and which nothing reads again soon.
__device__ __forceinline__ uint4 read_sixteen(const void *from) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
