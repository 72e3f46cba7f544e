// A warp orders the experts of one token by preference. Lane l holds experts l, l + 32, ...; their scores are converted to
// integers in the same order. The rules are in epsim/policies/routing, which gives the same expert ids. Compiled for
// EXPERTS: the most experts, a multiple of 32.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARPS = 16, THREADS = 32 * WARPS, PER_LANE = EXPERTS / 32, MOST_STEPS = 8;

struct Arguments {
    const float *scores;          // [batches, tokens, experts]: experts are compared by these scores
    const float *weight_basis;    // the same shape, >= 0: weights are proportional to it; null: softmax of the scores
    const i64 *choice;            // [batches, tokens, top_k]: the model's choice, -1 for none; null: the best top_k
    const float *choice_weights;  // [batches, tokens, top_k]: the weights of the choice; null if choice is null
    const u8 *selected;           // [batches, tokens]: the tokens to reroute or, if choice is null, the tokens that are not
                                  // padding; null: all tokens
    i64 *ids;                     // [batches, tokens, width]: the chosen experts, -1 for none
    float *weights;               // [batches, tokens, width]
    i64 *active;                  // [batches]: number of experts in the union
    // The next three pointers are for passes.cu only.
    i64 *message;                 // [batches, shape of `kind`]: numbers to be summed over ranks
    const i64 *summed;            // the sums over ranks; null: k0 is that of the only step
    const u8 *holds;              // [batches or 1, experts, ranks]: whether a rank has a copy of the expert
    // If choice is null: the weights of a token sum to scaling or, if renormalise is 0, to scaling times the probability of
    // the best top_k.
    float p, scaling;
    int renormalise;
    int tokens, experts, top_k, width, most, maxp, steps;  // most: kmax
    int kind, number, ranks, held_each, blocks;  // held_each: each batch has its own `holds`; blocks: of `answer`, per batch
    int size[MOST_STEPS], k0[MOST_STEPS];
};

// Converts a score to an integer above 0 in the same order. NaN is the smallest.
__device__ __forceinline__ u32 word_of(float score) {
    const int bits = score != score ? (int)0xff800000 : __float_as_int(score);
    return (u32)(bits >= 0 ? bits : -(bits & 0x7fffffff)) ^ 0x80000000u;
}

__device__ __forceinline__ float score_of(u32 word) {
    const int bits = (int)(word ^ 0x80000000u);
    return __int_as_float(bits >= 0 ? bits : (int)(0x80000000u | (u32)-bits));
}

// The state of a warp's token. In choice and left, bit i is expert lane + 32 i.
struct Token {
    u32 word[PER_LANE];  // The scores (word_of); 0 for an expert that the token may not take.
    u32 choice;
    int num_chosen;
    bool rerouted;
    double total;    // Sum of the token's weight_basis.
    float top, sum;  // Without weight_basis: the largest score, and the sum of exp(score - top).
    int num_taken;   // The number of experts taken so far. Lane i has the i-th in `expert` and `taken_word`.
    int expert;
    u32 taken_word, left;  // left: the experts not taken yet.
};

__device__ __forceinline__ double sum_of(double value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}

__device__ __forceinline__ float sum_of(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}

__device__ __forceinline__ float weigh(const Arguments &a, const Token &token, i64 row, int expert, u32 word) {
    if (!a.weight_basis) return __expf(score_of(word) - token.top) / token.sum;
    return a.weight_basis == a.scores ? score_of(word) : a.weight_basis[row * a.experts + expert];
}

// Loads the model's choice, and whether the token is to be rerouted.
__device__ __forceinline__ void load_choice(const Arguments &a, i64 row, int lane, Token &token) {
    token.choice = 0, token.num_chosen = 0;
    token.rerouted = !a.selected || a.selected[row];
    if (!a.choice) return;
    const int chosen = lane < a.top_k ? (int)a.choice[row * a.top_k + lane] : -1;
    for (int i = 0; i < a.top_k; ++i) {
        const int expert = __shfl_sync(~0u, chosen, i);
        if (expert >= 0 && expert % 32 == lane) token.choice |= 1u << expert / 32;
    }
    token.num_chosen = __popc(__ballot_sync(~0u, chosen >= 0));
    token.rerouted = token.rerouted && token.num_chosen;
}

__device__ __forceinline__ void load(const Arguments &a, i64 row, int lane, Token &token) {
    float score[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        score[i] = lane + 32 * i < a.experts ? a.scores[row * a.experts + lane + 32 * i] : __int_as_float(0xff800000);
    load_choice(a, row, lane, token);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const bool known = token.choice >> i & 1 || score[i] > __int_as_float(0xff800000);
        token.word[i] = known ? word_of(score[i]) : 0;
    }
    if (!a.weight_basis) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) most = token.word[i] > most ? token.word[i] : most;
        token.top = score_of(__reduce_max_sync(~0u, most));
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) sum += token.word[i] ? __expf(score[i] - token.top) : 0;
        token.sum = sum_of(sum);
    }
    if (a.p < 1) {
        double total = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (token.word[i]) total += weigh(a, token, row, lane + 32 * i, token.word[i]);
        token.total = sum_of(total);
    }
    token.num_taken = 0, token.expert = -1, token.taken_word = 0, token.left = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) token.left |= (token.word[i] != 0) << i;
}

// The best expert in `left`, -1 for none. Experts of the model's choice come first, then the others; both by score, ties by
// id. most: the expert's word.
__device__ __forceinline__ int best(const Token &token, u32 left, int lane, u32 &most) {
    for (int others = token.num_chosen ? 0 : 1; others < 2; ++others) {
        const u32 among = others ? left & ~token.choice : left & token.choice;
        u32 top = 0;
        int at = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (among >> i & 1 && token.word[i] > top) top = token.word[i], at = i;
        most = __reduce_max_sync(~0u, top);
        if (most) return __reduce_min_sync(~0u, top == most ? at * 32 + lane : ~0u);
    }
    return -1;
}

// The number of experts that the token prefers to `expert`.
__device__ __forceinline__ int position(const Token &token, int expert, int lane) {
    const int slot = expert / 32;
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        if (i == slot) word = token.word[i];
    word = __shfl_sync(~0u, word, expert % 32);
    const bool own = __shfl_sync(~0u, token.choice >> slot & 1, expert % 32);
    int before = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const bool like = (token.choice >> i & 1) == own;
        const bool better = token.word[i] > word || (token.word[i] == word && lane + 32 * i < expert);
        before += token.word[i] && (like ? better : !own);
    }
    return __reduce_add_sync(~0u, before);
}

__device__ __forceinline__ void take_out(u32 &left, int expert, int lane) {
    if (expert % 32 == lane) left &= ~(1u << expert / 32);
}

__device__ __forceinline__ void take(Token &token, int expert, u32 word, int lane) {
    take_out(token.left, expert, lane);
    if (lane == token.num_taken) token.expert = expert, token.taken_word = word;
    ++token.num_taken;
}

// The part of a set of experts that a lane holds: bit i is expert lane + 32 i. Word i of `loaded` has experts 32 i to
// 32 i + 31.
__device__ __forceinline__ u32 part_of(const u32 *loaded, int lane) {
    u32 part = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) part |= (loaded[i] >> lane & 1) << i;
    return part;
}

// Takes experts until `most` are taken: the best ones in `allowed`, after those that `guarantee` has already taken. Then
// computes and writes their weights. maxp does not limit the model's choice if k0 is 0 (the batch is below the first step).
__device__ __forceinline__ void choose(
    const Arguments &a, Token &token, i64 row, int k0, int most, u32 allowed, int lane) {
    int expert_id = -1;
    float weight = 0;
    if (token.rerouted) {
        u32 word;
        const int spared = k0 ? 0 : a.choice ? token.num_chosen : a.top_k;
        while (token.num_taken < most) {
            const int expert = best(token, token.left & allowed, lane, word);
            if (expert < 0) break;
            if (token.num_taken >= spared && a.maxp < a.experts && position(token, expert, lane) >= a.maxp) break;
            take(token, expert, word, lane);
        }
        expert_id = token.expert;
        const float own = expert_id >= 0 ? weigh(a, token, row, expert_id, token.taken_word) : 0;
        float total = a.scaling;
        if (a.choice) {
            total = sum_of(lane < a.top_k ? a.choice_weights[row * a.top_k + lane] : 0.f);
        } else if (!a.renormalise) {
            float chosen = 0;
            u32 rest = 0;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) rest |= (token.word[i] != 0) << i;
            for (int i = 0; i < a.top_k; ++i) {
                const int expert = best(token, rest, lane, word);
                if (expert < 0) break;
                take_out(rest, expert, lane);
                chosen += weigh(a, token, row, expert, word);
            }
            total *= chosen;
        }
        weight = own / fmaxf(sum_of(own), 1e-20f) * total;
    } else if (a.choice && lane < a.top_k) {
        expert_id = (int)a.choice[row * a.top_k + lane], weight = a.choice_weights[row * a.top_k + lane];
    }
    if (lane < a.width) a.ids[row * a.width + lane] = expert_id, a.weights[row * a.width + lane] = weight;
}
