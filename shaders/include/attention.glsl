// What the attention kernels share: q.k of a chunk of KEYS keys, and each score from it.
//
// What includes this has defined KEY_STRIDE, how many positions lie from one key of a chunk to the next, and bound q, k
// and keys. 8 invocations share a key, one in 8 lanes each; then each invocation finishes a score. With PATCHES every key is
// in the cache, none in the block, rows see to both sides, and a sink may stand on the first key.

const uint LANES = 32;
const uint KEYS = 128;  // a chunk: whole rounds of 32 lanes, a key an invocation
const uint PITCH = 9;   // of a key's 8 partial sums, so that neighbours lie in other banks

shared float partials[HEADS * KEYS * PITCH];  // [head][key][lane mod 8]
shared float weights[HEADS * KEYS];           // e_j of a chunk; between the passes other numbers
shared float maxima[HEADS];

// This invocation's lanes of q: part, part + 8, part + 16, part + 24 of each 32 columns.
vec4 lanes_of_q[HEADS * STEPS];

// What a group works on.
struct Task {
    uint row;
    uint kv;
    uint head;       // the first of HEADS; what is past the kv head's last is computed in vain
    uint last_head;
    uint low;        // positions low to high are visible
    uint high;
};

uint head_of(Task t, uint h) {
    return min(t.head + h, t.last_head);
}

bool visible(Task t, uint j) {
    return j >= t.low && j <= t.high;
}

// How many keys of the chunk from j0 on lie below position j.
uint key_of(uint j, uint j0) {
    return j <= j0 ? 0 : min((j - j0 + KEY_STRIDE - 1) / KEY_STRIDE, KEYS);
}

uint cached_row(Task t, uint j) {
    return t.kv * cache_rows + j % cache_rows;
}

#ifndef PATCHES
uint own_row(Task t, uint j) {
    return (j - start) * kv_heads + t.kv;
}
#endif

// 4 lanes' columns of a head. What is past the last column gets the first again: q has zeros there, which change no sum.
uvec4 columns_of(uint step, out bvec4 there) {
    uvec4 d = uvec4(0, 8, 16, 24) + (LANES * step + (gl_LocalInvocationID.x & 7));
    there = lessThan(d, uvec4(head_dim));
    return mix(uvec4(0), d, there);
}

void load_q(Task t) {
    [[unroll]] for (uint step = 0; step < STEPS; step++) {
        bvec4 there;
        uvec4 d = columns_of(step, there);
        [[unroll]] for (uint h = 0; h < HEADS; h++) {
            uint at = (t.row * heads + head_of(t, h)) * head_dim;
            vec4 all = vec4(q[at + d.x], q[at + d.y], q[at + d.z], q[at + d.w]);
            lanes_of_q[h * STEPS + step] = mix(vec4(runtime_zero()), all, there);
        }
    }
}

// q.k of the chunk's keys from `first_key` up to `end`, which all lie in one buffer: all but the last three steps of the trees.
#define ADD_PRODUCTS(buffer, first_key, end, place)                                                          \
    for (uint key = octet + (octet < (first_key) ? ((first_key) - octet + 15) / 16 * 16 : 0); key < (end); key += 16) { \
        uint at = (place);                                                                                   \
        precise vec4 acc[HEADS];                                                                             \
        [[unroll]] for (uint h = 0; h < HEADS; h++) acc[h] = vec4(runtime_zero());                           \
        [[unroll]] for (uint step = 0; step < STEPS; step++) {                                               \
            bvec4 there;                                                                                     \
            uvec4 d = columns_of(step, there);                                                               \
            vec4 kept = vec4(buffer[at + d.x], buffer[at + d.y], buffer[at + d.z], buffer[at + d.w]);        \
            kept = mix(vec4(runtime_zero()), kept, there);                                                   \
            [[unroll]] for (uint h = 0; h < HEADS; h++) {                                                    \
                precise vec4 product = lanes_of_q[h * STEPS + step] * kept;                                  \
                acc[h] = acc[h] + product;                                                                   \
            }                                                                                                \
        }                                                                                                    \
        [[unroll]] for (uint h = 0; h < HEADS; h++) {                                                        \
            precise vec2 pairs = acc[h].xy + acc[h].zw;                                                      \
            precise float sum = pairs.x + pairs.y;                                                           \
            partials[(h * KEYS + key) * PITCH + part] = sum;                                                 \
        }                                                                                                    \
    }

// Two loops, as the block's own keys lie apart from the older ones.
void add_products(Task t, uint j0) {
    uint octet = gl_LocalInvocationID.x >> 3, part = gl_LocalInvocationID.x & 7;
    uint first_key = key_of(t.low, j0), end = key_of(t.high + 1, j0);
#ifdef PATCHES
    ADD_PRODUCTS(keys, first_key, end, keys_at + cached_row(t, j0 + KEY_STRIDE * key) * head_dim)
#else
    uint middle = key_of(start, j0);
    ADD_PRODUCTS(keys, first_key, middle, keys_at + cached_row(t, j0 + KEY_STRIDE * key) * head_dim)
    ADD_PRODUCTS(k, max(first_key, middle), end, own_row(t, j0 + KEY_STRIDE * key) * head_dim)
#endif
}

// The score of this invocation's key.
float score(uint h) {
    uint at = (h * KEYS + gl_LocalInvocationID.x) * PITCH;
    precise vec4 fours = vec4(partials[at], partials[at + 1], partials[at + 2], partials[at + 3])
                       + vec4(partials[at + 4], partials[at + 5], partials[at + 6], partials[at + 7]);
    precise float result = tree4(fours) * uintBitsToFloat(scale_bits);
    return result;
}

#ifdef PATCHES
// The score of key j, the first key's with its sink where that reading is chosen.
float score_of(Task t, uint j, uint h) {
    precise float result = score(h);
    if (key0 != 0 && j == 0) result = result + slab[sinks_at + head_of(t, h)];
    return result;
}
#define SCORE(t, j, h) score_of(t, j, h)
#else
#define SCORE(t, j, h) score(h)
#endif

// A score that is NaN may get lost here: its e is NaN all the same, and with it everything.
float larger(float a, float b) {
    return b > a ? b : a;
}

// m[h] takes the score of this invocation's key of the chunk.
void take_maxima(Task t, uint j0, inout float m[HEADS]) {
    uint j = j0 + KEY_STRIDE * gl_LocalInvocationID.x;
    if (!visible(t, j)) return;
    [[unroll]] for (uint h = 0; h < HEADS; h++) m[h] = larger(m[h], SCORE(t, j, h));
}

// maxima[h]: the largest of all invocations' m[h].
void reduce_maxima(float m[HEADS]) {
    uint id = gl_LocalInvocationID.x;
    [[unroll]] for (uint h = 0; h < HEADS; h++) weights[h * KEYS + id] = m[h];
    barrier();
    if (id < HEADS * LANES) {
        uint at = id / LANES * KEYS + id % LANES;
        for (uint i = 1; i < KEYS / LANES; i++) weights[at] = larger(weights[at], weights[at + i * LANES]);
    }
    barrier();
    if (id < HEADS) {
        float most = weights[id * KEYS];
        for (uint lane = 1; lane < LANES; lane++) most = larger(most, weights[id * KEYS + lane]);
        maxima[id] = most;
    }
    barrier();
}

// The group's i-th task in a row.
Task task_of(uint row, uint i) {
    uint group = heads / kv_heads, tiles = (group + HEADS - 1) / HEADS;
    uint kv = i / tiles;
#ifdef PATCHES
    uint here = start + row, last = patches - 1;
    uint low = here > reach ? here - reach : 0, high = last - here > reach ? here + reach : last;
#else
    uint high = start + row;
    uint low = window != 0 && high >= window ? high - window + 1 : 0;
#endif
    return Task(row, kv, kv * group + i % tiles * HEADS, (kv + 1) * group - 1, low, high);
}

// How many there are.
uint tasks() {
    return kv_heads * ((heads / kv_heads + HEADS - 1) / HEADS);
}
