// Inline PTX for instructions of batch.cu that CUDA C++ lacks.

// Loads 16 bytes of weights: read-only data that is not read again soon.
__device__ __forceinline__ uint4 read_sixteen(const void *from) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
