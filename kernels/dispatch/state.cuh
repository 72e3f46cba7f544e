// The arguments of all dispatch kernels, and the random draws of epsim/policies/hashing.py.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define ALL 0xffffffffu
#define NONE 0xffffffffu  // no expert in this column of a token

const int BITS = 20, ONE = 1 << BITS;       // fixed-point fractions
const int ORDINAL_BITS = 22;                // bits of a word with the token's index; the other 10 bits have the expert
const int FEW_TOKENS = 64, COST_BITS = 20;  // Waterfill: batches of fewer tokens stay local; cost is in 2^-COST_BITS
enum { SYSTEMATIC, SAMPLED, GATHERED, STATIC };  // how tokens are assigned to copies
enum { NO_SHARED, LOCAL, VISITED, EVERY };       // which ranks may serve a shared expert

struct alignas(8) Copy {
  u16 slot, expert, index, number;  // index: among the expert's copies; number: of the expert's copies
};

struct Arguments {
  const i64 *ids;      // [tokens, top_k]
  const i64 *rows;     // [ranks, experts + 1]: counts of all ranks
  i64 *loads;          // [experts + 1]: sums of `rows` over ranks
  const void *split;   // [slots]: float64, or int64 if gathered; null for an even split
  i64 *counts;         // [experts + 1]: this rank's tokens by expert, then the number of tokens with any expert
  i64 *rank_counts;    // [experts + 1]: a copy of `counts` for later launches, because the caller may overwrite `counts`
  u32 *words;          // [tokens, top_k]: expert << 22 | the token's index among this rank's tokens of the expert
  u32 *ends;           // [slots]: if gathered, the running sums of this rank's quotas over the copies of each expert
  i64 *routed;         // [ranks]: the assignments that each rank serves
  const i64 *step;     // [1]: the number of the step, for random draws
  i64 *physical;       // [tokens, top_k]
  i64 *shared_rank;    // [tokens]
  i64 *slots_out;      // [tokens, top_k + 1]: slots numbered with one more slot per rank, for the shared expert
  const u16 *first;    // [experts + 1]: an expert's copies are first[e] .. first[e + 1] - 1
  const Copy *copies;  // [slots], by expert, then by slot
  const u16 *nearest;  // [ranks, experts]: the slot to which a rank sends an expert's tokens
  const u16 *node;     // [2, ranks]: the first rank of a rank's node, and the first rank after the node
  i64 seed_key, layer_key;  // hashing.chain of the seed alone, and of the layer alone
  i64 cost;                 // of a shared-expert token, in 2^-20 assignments
  int tokens, top_k, experts, slots, ranks, rank;
  int follow, shared, global, plus_local;
};

template <class T>
__device__ T *allocate(char *&at, int count) {
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

// The part of the hash key that all tokens of the rank share. The token's index is added last.
__device__ u64 rank_key(const Arguments &a) { return chain(chain(a.seed_key, *a.step), a.rank); }

__device__ u64 draw(const Arguments &a, u64 key, int token, int slot, int bits) {
  return finalise(chain(key, token) + chain(a.layer_key, slot)) >> (64 - bits);
}

__device__ int slots_per_rank(const Arguments &a) { return a.slots / a.ranks; }
