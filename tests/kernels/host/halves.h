// Replaces kernels/experts/hopper.cuh and kernels/reader/halves.cuh on the host.

#include "hopper.h"

struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
struct int4 { int x, y, z, w; };

static void wait_for_previous_kernel() {}
static void allow_next_kernel() {}
static float from_half(u16 bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) return mantissa ? NAN : bits >> 15 ? -INFINITY : INFINITY;
    const float size = exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
    return bits >> 15 ? -size : size;
}
static u16 to_half(float value) {
    const float size = value < 0 ? -value : value;
    if (std::isnan(value)) return 0x7fff;
    if (std::isinf(value)) return value < 0 ? 0xfc00 : 0x7c00;
    if (size > 65504.0f) abort();
    int exponent;
    std::frexp(size, &exponent);
    const int least = exponent < -13 ? -24 : exponent - 11;  // The last bit's.
    const float whole = std::nearbyint(std::ldexp(size, -least));
    const int top = size == 0 || least == -24 && whole < 1024 ? 0 : least + 25;
    const u16 bits = top ? (whole >= 2048 ? (top + 1) << 10 : (top << 10) + (int)whole - 1024) : (int)whole;
    return bits | (value < 0 ? 0x8000 : 0);
}
static u32 __byte_perm(u32 one, u32 other, u32 which) {
    const u64 bytes = one | (u64)other << 32;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(bytes >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return found;
}
static float __fdividef(float one, float other) { return one / other; }
static u32 thirds(u32 halves) {
    u32 both = 0;
    for (int shift = 0; shift < 32; shift += 16)
        both |= (u32)to_half(from_half(halves >> shift & 0xffff) * from_half(0x3555)) << shift;
    return both;
}
static u32 code_sums(u32 bytes) { return bytes & 0x807f807fu; }
// An asynchronous copy is done only when the thread waits for its group.
struct Copies { std::vector<std::vector<std::function<void()>>> groups{1}; };
static std::vector<Copies> copies;
static Copies &own_copies() {
    if (copies.size() != fibers.size()) copies = std::vector<Copies>(fibers.size());
    return copies[current];
}
static void copy_16(void *to, const void *from) {
    if ((u64)to % 16 || (u64)from % 16) abort();
    own_copies().groups.back().push_back([=] { memcpy(to, from, 16); });
}
static void end_group() { own_copies().groups.emplace_back(); }
template <int LATER> static void wait_for_copies() {
    auto &groups = own_copies().groups;
    // The last group is still open.
    while ((int)groups.size() > LATER + 1) {
        for (auto &copy : groups.front()) copy();
        groups.erase(groups.begin());
    }
}
static void wait_for_all_copies() { end_group(), wait_for_copies<0>(); }
static void fence_before_copies() {}
static u64 tagged(u32 bits, u32 tag) { return (u64)tag << 32 | bits; }
static void put_tagged(u64 *at, u32 bits, u32 tag) { *at = tagged(bits, tag); }
static void put_two_tagged(u64 *at, float one, float other, u32 tag) {
    if ((u64)at % 16) abort();
    put_tagged(at, __float_as_int(one), tag), put_tagged(at + 1, __float_as_int(other), tag);
}
static u64 get_tagged(const u64 *at) { give_way(); return *at; }
static void get_two_tagged(const u64 *at, u64 &one, u64 &other) {
    if ((u64)at % 16) abort();
    one = get_tagged(at), other = get_tagged(at + 1);
}
static int atomicAdd(int *at, int more) {
    const int old = *at;
    *at += more;
    return old;
}
static unsigned atomicAdd(unsigned *at, unsigned more) {
    const unsigned old = *at;
    *at += more;
    return old;
}
static void multiply_halves(float4 &sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const auto half = [](u32 bits, int which) { return from_half(bits >> which * 16 & 0xffff); };
    multiply_as(half, sum, a0, a1, a2, a3, b0, b1);
}
