// Functions that all kernels of the reader use. GELU: 1 for GELU, 0 for SiLU.

__device__ __forceinline__ float low(u32 bits) { return __int_as_float(bits << 16); }
__device__ __forceinline__ float high(u32 bits) { return __int_as_float(bits & 0xffff0000u); }
__device__ __forceinline__ float wide(u16 bits) { return __int_as_float((u32)bits << 16); }

__device__ __forceinline__ float activation(float gate) {
#if GELU
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1 + __expf(-2 * inner));
#else
    return gate / (1 + __expf(-gate));
#endif
}

// Multiplies a block of 128 coordinates, 4 per lane, with a Hadamard matrix, without the factor 128^-0.5. Called by one warp.
__device__ __forceinline__ void hadamard(float (&v)[4], int lane) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (!(i & distance)) {
                const float one = v[i], other = v[i | distance];
                v[i] = one + other, v[i | distance] = one - other;
            }
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(~0u, v[i], distance);
            v[i] = lane & distance ? other - v[i] : v[i] + other;
        }
}
