// The arguments of all kernels, and the draws of epsim/policies/hashing.py.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define ALL 0xffffffffu
#define NONE 0xffffffffu  // an empty slot of a token

const int BITS = 20, ONE = 1 << BITS;         // fixed point
const int ORDINAL_BITS = 22;                  // of a word; the expert has the other 10
const int FEW_TOKENS = 64, COST_BITS = 20;    // Waterfill's
enum { SYSTEMATIC, SAMPLED, GATHERED, STATIC };  // how tokens follow
enum { NO_SHARED, LOCAL, VISITED, EVERY };       // where a shared expert may go

struct alignas(8) Copy {
  u16 slot, expert, index, number;  // its place among its expert's copies, and how many these are
};

struct Arguments {
  const i64 *ids;      // [tokens, top_k]
  const i64 *rows;     // [ranks, experts + 1]: counts of all ranks
  i64 *loads;          // [experts + 1]: their sum
  const void *split;   // [slots]: float64, int64 where gathered; null for an even one
  i64 *counts;         // [experts + 1]: this rank's tokens by expert, and how many tokens have any
  i64 *own;            // [experts + 1]: the same, for later launches
  u32 *words;          // [tokens, top_k]: expert << 22 | index among the expert's tokens of this rank
  u32 *ends;           // [slots]: where gathered, the running sums of an expert's quotas of this rank, by copy
  i64 *routed;         // [ranks]: assignments that each serves
  const i64 *step;     // [1]
  i64 *physical;       // [tokens, top_k]
  i64 *shared_rank;    // [tokens]
  i64 *slots_out;      // [tokens, top_k + 1]: slots counted with a shared one a rank
  const u16 *first;    // [experts + 1]: an expert's copies are first[e] .. first[e + 1] - 1
  const Copy *copies;  // [slots], by expert, then by slot
  const u16 *nearest;  // [ranks, experts]: the slot to which a rank sends an expert's tokens
  const u16 *node;     // [ranks], then [ranks]: the first rank of a rank's node, and the first after it
  i64 seed_key, layer_key;  // hashing.chain's first link of each
  i64 cost;                 // of a shared expert, in 2^-20
  int tokens, top_k, experts, slots, ranks, rank;
  int follow, shared, global, plus_local;
};

template <class T>
__device__ T *take(char *&at, int count) {
  T *here = reinterpret_cast<T *>(at);
  at += (count * sizeof(T) + 15) / 16 * 16;
  return here;
}

__device__ u64 finalise(u64 bits) {
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
  return bits ^ bits >> 31;
}

__device__ u64 chain(u64 key, i64 part) { return finalise((key ^ static_cast<u64>(part)) + 0x9e3779b97f4a7c15ull); }

// All but the token's index, which comes last.
__device__ u64 rank_key(const Arguments &a) { return chain(chain(a.seed_key, *a.step), a.rank); }

__device__ u64 draw(const Arguments &a, u64 key, int token, int slot, int bits) {
  return finalise(chain(key, token) + chain(a.layer_key, slot)) >> (64 - bits);
}

__device__ int slots_per_rank(const Arguments &a) { return a.slots / a.ranks; }
