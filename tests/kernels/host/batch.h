// What stands for the headers of kernels/reader/batch.cu on the host.

#include "halves.h"

static int min(int a, int b) { return a < b ? a : b; }
static u32 thirds(u32 halves) {
    u32 both = 0;
    for (int shift = 0; shift < 32; shift += 16)
        both |= (u32)to_half(from_half(halves >> shift & 0xffff) * from_half(0x3555) + from_half(0x6155)) << shift;
    return both;
}
static uint4 read_sixteen(const void *from) {
    if ((u64)from % 16) abort();
    return *(const uint4 *)from;
}
