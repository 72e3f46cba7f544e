// Finds further experts that ranks can read without more active experts on the busiest rank, with one warp
// (epsim/policies/routing/matching.py has the rule). Each expert that must be read is assigned to a rank with a copy, so
// that the largest number M of experts on a rank is minimal. Then other experts are added, those in highest demand first,
// as long as every rank has at most M. If all ranks of an expert are full, experts move along a shortest augmenting path.
// The choice of path does not change which experts fit: such sets are the independent sets of a matroid, and the greedy
// set of a matroid is unique.

constexpr int MOST_RANKS = 64;

struct Ranks {
    u64 holds[EXPERTS];  // Bit r: rank r has a copy.
    i64 worth[EXPERTS];
    int order[EXPERTS];  // Experts in demand, the highest demand first.
    int rank_of[EXPERTS];
    u32 active[MOST_RANKS], waiting[PER_LANE];
    int via[MOST_RANKS];  // The expert that would move to this rank.
    u32 wanted;
};

__device__ __forceinline__ u64 any_of(u64 bits) {
    const u32 low = __reduce_or_sync(~0u, (u32)bits), high = __reduce_or_sync(~0u, (u32)(bits >> 32));
    return (u64)high << 32 | low;
}

// The position of an expert in descending order of worth; ties by id.
__device__ __forceinline__ int order_of(const i64 *worth, int expert) {
    const i64 own = worth[expert];
    int before = 0;
#pragma unroll 8
    for (int other = 0; other < EXPERTS; ++other)
        before += worth[other] > own || (worth[other] == own && other < expert);
    return before;
}

// Sets of ranks as bits. room: ranks with fewer than `most` experts. closed: ranks from which no path leads to room.
struct Room {
    u32 most;
    u64 room, closed;
};

// Assigns an expert to a rank by a breadth-first search for an augmenting path. Returns false if all ranks reached are full.
__device__ __forceinline__ bool augment(Ranks &s, int expert, Room &at, int lane) {
    u64 reach = s.holds[expert] & ~at.closed, fresh = reach;
    for (int rank = lane; rank < MOST_RANKS; rank += 32)
        if (reach >> rank & 1) s.via[rank] = expert;
    while (!(fresh & at.room)) {
        if (!fresh) {
            at.closed |= reach;
            return false;
        }
        __syncwarp();
        u64 next = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int other = lane + 32 * i, rank = s.rank_of[other];
            if (rank < 0 || !(fresh >> rank & 1)) continue;
            const u64 more = s.holds[other] & ~reach & ~at.closed;
            for (u64 left = more; left; left &= left - 1) s.via[__ffsll(left) - 1] = other;
            next |= more;
        }
        fresh = any_of(next);
        reach |= fresh;
    }
    const int last = __ffsll(fresh & at.room) - 1;
    __syncwarp();
    const u32 number = s.active[last] + 1;
    __syncwarp();
    if (lane == 0) {
        s.active[last] = number;
        for (int rank = last, mover = -1; mover != expert;) {
            mover = s.via[rank];
            const int left = s.rank_of[mover];
            s.rank_of[mover] = rank, rank = left;
        }
    }
    __syncwarp();
    if (number == at.most) at.room &= ~(1ull << last);
    return true;
}

// Adds to `loaded`, the experts that must be read, the further experts that fit. want [experts]: the demand. All threads
// must call it.
__device__ __forceinline__ void fill_ranks(const Arguments &a, Ranks &s, const u8 *holds, const i64 *want, u32 *loaded) {
    const int lane = threadIdx.x % 32;
    for (int rank = threadIdx.x; rank < MOST_RANKS; rank += blockDim.x) s.active[rank] = 0;
    if (threadIdx.x == 0) s.wanted = 0;
    __syncthreads();
    for (int expert = threadIdx.x; expert < EXPERTS; expert += blockDim.x) {
        const bool must = loaded[expert / 32] >> lane & 1;
        u64 mask = 0;
        if (expert < a.experts)
            for (int rank = 0; rank < a.ranks; ++rank) mask |= (u64)(holds[expert * a.ranks + rank] != 0) << rank;
        // An expert with one copy is assigned to its rank at once.
        const bool bound = must && mask && !(mask & mask - 1);
        if (bound) atomicAdd(&s.active[__ffsll(mask) - 1], 1u);
        s.holds[expert] = mask, s.rank_of[expert] = bound ? __ffsll(mask) - 1 : -1;
        s.worth[expert] = must || expert >= a.experts ? 0 : want[expert];
        const u32 waiting = __ballot_sync(~0u, must && !bound), wanted = __ballot_sync(~0u, s.worth[expert] > 0);
        if (lane == 0) s.waiting[expert / 32] = waiting, atomicAdd(&s.wanted, (u32)__popc(wanted));
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < EXPERTS; expert += blockDim.x)
        if (s.worth[expert] > 0) s.order[order_of(s.worth, expert)] = expert;
    __syncthreads();
    if (threadIdx.x < 32) {
        const u32 musts = __reduce_add_sync(~0u, lane < PER_LANE ? (u32)__popc(loaded[lane]) : 0u);
        const u32 busiest = __reduce_max_sync(~0u, s.active[lane] > s.active[lane + 32] ? s.active[lane] : s.active[lane + 32]);
        const u32 mean = (musts + a.ranks - 1) / a.ranks;
        const u64 all = a.ranks == 64 ? ~0ull : (1ull << a.ranks) - 1;
        Room at = {busiest > mean ? busiest : mean, 0, 0};
        const u32 low = __ballot_sync(~0u, s.active[lane] < at.most), high = __ballot_sync(~0u, s.active[lane + 32] < at.most);
        at.room = ((u64)high << 32 | low) & all;
        for (int i = 0; i < PER_LANE; ++i)
            for (u32 left = s.waiting[i]; left; left &= left - 1) {
                const int expert = 32 * i + __ffs(left) - 1;
                if (augment(s, expert, at, lane)) continue;
                at = {at.most + 1, all, 0};
                augment(s, expert, at, lane);
            }
        const int wanted = s.wanted;
        for (int i = 0; i < wanted && at.closed != all; ++i) augment(s, s.order[i], at, lane);
        for (int i = 0; i < PER_LANE; ++i) {
            const u32 read = __ballot_sync(~0u, s.rank_of[lane + 32 * i] >= 0);
            if (lane == 0) loaded[i] = read;
        }
    }
}
