// Causal attention of a block's rows over a layer's cache and the block itself, full or over a window; one dispatch.
//
// q [rows][heads][head_dim], k [rows][kv_heads][head_dim], v [rows][kv_heads][v_dim]: the block's own, turned and scaled
// keys [kv_heads][cache_rows][head_dim] from keys_at words on, values [kv_heads][cache_rows][v_dim] from values_at on:
//   position j in row j mod cache_rows, for j below `start`
// slab: the heads' sinks as float bits from sinks_at words on; out [rows][out_stride] float, heads times v_dim
//
// Row i sees positions 0..start+i, with a window W the last W of them. s_j = tree(q.k_j, g = 1) * scale; m the maximum of
// the visible s_j, and of the sink; e_j = exp(s_j - m); den = tree of e_j, + exp(sink - m); out_d = tree of e_j * v_jd,
// times reciprocal(den). Over keys the lane is the position mod 32, positions increasing.
//
// A group takes a row and HEADS query heads of one kv head, and KEYS positions at a time: 8 invocations share a key, one in 8
// lanes each; then each invocation finishes a score; then each takes a column of v, all 32 lanes' sums in registers. Scores
// are computed twice, once for m, so that none has to be stored.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "float_controls.glsl"
#include "elementary.glsl"
#include "step.glsl"
#include "tree.glsl"

layout(constant_id = 0) const uint HEADS = 1;  // 1 or 2

layout(local_size_x = 128) in;
layout(std430, binding = 1) readonly buffer Q { float q[]; };
layout(std430, binding = 2) readonly buffer K { float k[]; };
layout(std430, binding = 3) readonly buffer V { float v[]; };
layout(std430, binding = 4) readonly buffer Keys { float keys[]; };
layout(std430, binding = 5) readonly buffer Values { float values[]; };
layout(std430, binding = 6) readonly buffer Slab { float slab[]; };
layout(std430, binding = 7) writeonly buffer Out { float attended[]; };
layout(push_constant) uniform Push {
    uint heads;
    uint kv_heads;
    uint head_dim;
    uint v_dim;
    uint out_stride;  // floats a row
    uint window;      // 0: all positions
    uint cache_rows;
    uint keys_at;     // words
    uint values_at;
    uint has_sink;    // 0 or 1
    uint sinks_at;
    uint scale_bits;  // float32(head_dim ** -0.5)
};

const uint LANES = 32;
const uint KEYS = 128;  // a chunk: whole rounds of 32 lanes, a key an invocation
const uint SUMS = HEADS * LANES;  // named, as each product written out would make an array type of its own
const uint PITCH = 9;   // of a key's 8 partial sums, so that neighbours lie in other banks
const uint OWN = 0x80000000u;  // in a place: in the block's own v
const uint UNSEEN = 0xFFFFFFFFu;

shared float partials[HEADS * KEYS * PITCH];  // [head][key][lane mod 8]
shared float weights[HEADS * KEYS];           // e_j of a chunk; between the passes other numbers
shared uint places[KEYS];                     // where a key's values begin
shared float maxima[HEADS];
shared float inverses[HEADS];

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

// q.k of a chunk, all but the last three steps of the trees.
void add_products(Task t, uint j0) {
    uint part = gl_LocalInvocationID.x & 7;
    for (uint key = gl_LocalInvocationID.x >> 3; key < KEYS; key += gl_WorkGroupSize.x / 8) {
        uint j = j0 + key;
        if (!visible(t, j)) continue;
        bool own = j >= start;
        uint at = own ? ((j - start) * kv_heads + t.kv) * head_dim
                      : keys_at + (t.kv * cache_rows + j % cache_rows) * head_dim;
        precise vec4 acc[HEADS];  // lanes part, part + 8, part + 16, part + 24
        [[unroll]] for (uint h = 0; h < HEADS; h++) acc[h] = vec4(runtime_zero());
        for (uint d = part; d < head_dim; d += LANES) {
            // The last round may be short: what is past it gets zeros, which change no sum.
            bvec4 there = lessThan(uvec4(d, d + 8, d + 16, d + 24), uvec4(head_dim));
            uvec4 i = mix(uvec4(d), uvec4(d, d + 8, d + 16, d + 24), there);
            vec4 kept = own ? vec4(k[at + i.x], k[at + i.y], k[at + i.z], k[at + i.w])
                            : vec4(keys[at + i.x], keys[at + i.y], keys[at + i.z], keys[at + i.w]);
            [[unroll]] for (uint h = 0; h < HEADS; h++) {
                uint q_at = (t.row * heads + head_of(t, h)) * head_dim;
                precise vec4 product = vec4(q[q_at + i.x], q[q_at + i.y], q[q_at + i.z], q[q_at + i.w]) * kept;
                acc[h] = acc[h] + mix(vec4(runtime_zero()), product, there);
            }
        }
        [[unroll]] for (uint h = 0; h < HEADS; h++) {
            precise vec2 pairs = acc[h].xy + acc[h].zw;
            precise float sum = pairs.x + pairs.y;
            partials[(h * KEYS + key) * PITCH + part] = sum;
        }
    }
}

// The score of this invocation's key.
float score(uint h) {
    uint at = (h * KEYS + gl_LocalInvocationID.x) * PITCH;
    precise vec4 fours = vec4(partials[at], partials[at + 1], partials[at + 2], partials[at + 3])
                       + vec4(partials[at + 4], partials[at + 5], partials[at + 6], partials[at + 7]);
    precise float result = tree4(fours) * uintBitsToFloat(scale_bits);
    return result;
}

// The larger one, or whichever is NaN.
float larger(float a, float b) {
    return b > a || (floatBitsToUint(b) & MAGNITUDE_BITS) > INFINITY_BITS ? b : a;
}

float sink_of(Task t, uint h) {
    return slab[sinks_at + head_of(t, h)];
}

// maxima[h]: what is subtracted from a head's scores.
void find_maxima(Task t) {
    uint id = gl_LocalInvocationID.x;
    float m[HEADS];
    [[unroll]] for (uint h = 0; h < HEADS; h++) m[h] = uintBitsToFloat(INFINITY_BITS | SIGN_BIT);
    for (uint j0 = t.low - t.low % LANES; j0 <= t.high; j0 += KEYS) {
        add_products(t, j0);
        barrier();
        if (visible(t, j0 + id)) {
            [[unroll]] for (uint h = 0; h < HEADS; h++) m[h] = larger(m[h], score(h));
        }
        barrier();
    }
    [[unroll]] for (uint h = 0; h < HEADS; h++) weights[h * KEYS + id] = m[h];
    barrier();
    if (id < SUMS) {
        uint at = id / LANES * KEYS + id % LANES;
        for (uint i = 1; i < KEYS / LANES; i++) weights[at] = larger(weights[at], weights[at + i * LANES]);
    }
    barrier();
    if (id < HEADS) {
        float most = weights[id * KEYS];
        for (uint lane = 1; lane < LANES; lane++) most = larger(most, weights[id * KEYS + lane]);
        maxima[id] = has_sink != 0 && sink_of(t, id) > most ? sink_of(t, id) : most;
    }
    barrier();
}

// weights[h][key] = e of the scores of a chunk, and where the values lie.
void find_weights(Task t, uint j0) {
    uint id = gl_LocalInvocationID.x, j = j0 + id;
    bool seen = visible(t, j);
    uint own = OWN | ((j - start) * kv_heads + t.kv) * v_dim;
    uint cached = values_at + (t.kv * cache_rows + j % cache_rows) * v_dim;
    places[id] = seen ? (j >= start ? own : cached) : UNSEEN;
    if (!seen) return;
    [[unroll]] for (uint h = 0; h < HEADS; h++) {
        precise float distance = score(h) - maxima[h];
        weights[h * KEYS + id] = elementary_exp(distance);
    }
}

void add_values(uint d, inout float acc[SUMS]) {
    for (uint first_key = 0; first_key < KEYS; first_key += LANES) {
        [[unroll]] for (uint lane = 0; lane < LANES; lane++) {
            uint place = places[first_key + lane];
            if (place == UNSEEN) continue;
            float value = place >= OWN ? v[place - OWN + d] : values[place + d];
            [[unroll]] for (uint h = 0; h < HEADS; h++) {
                precise float product = weights[h * KEYS + first_key + lane] * value;
                precise float sum = acc[h * LANES + lane] + product;
                acc[h * LANES + lane] = sum;
            }
        }
    }
}

// Invocation id adds the weights of head id / 32's lane id % 32.
float add_weights(float lane_sum) {
    uint id = gl_LocalInvocationID.x, lane = id % LANES;
    precise float sum = lane_sum;
    for (uint key = lane; key < KEYS; key += LANES) {
        if (places[key] != UNSEEN) sum = sum + weights[id / LANES * KEYS + key];
    }
    return sum;
}

// inverses[h] = reciprocal(the tree of the head's lanes, and the sink's share)
void find_inverses(Task t, float lane_sum) {
    uint id = gl_LocalInvocationID.x;
    if (id < SUMS) weights[id] = lane_sum;
    barrier();
    if (id < HEADS) {
        vec4 quads[8];
        [[unroll]] for (uint i = 0; i < 8; i++) {
            uint at = id * LANES + 4 * i;
            quads[i] = vec4(weights[at], weights[at + 1], weights[at + 2], weights[at + 3]);
        }
        precise float den = tree32(quads[0], quads[1], quads[2], quads[3], quads[4], quads[5], quads[6], quads[7]);
        if (has_sink != 0) {
            precise float distance = sink_of(t, id) - maxima[id];
            den = den + elementary_exp(distance);
        }
        inverses[id] = elementary_reciprocal(den);
    }
    barrier();
}

float tree_of(float a[SUMS], uint h) {
    vec4 quads[8];
    [[unroll]] for (uint i = 0; i < 8; i++) {
        uint at = h * LANES + 4 * i;
        quads[i] = vec4(a[at], a[at + 1], a[at + 2], a[at + 3]);
    }
    return tree32(quads[0], quads[1], quads[2], quads[3], quads[4], quads[5], quads[6], quads[7]);
}

// Columns d0 to d0 + 127 of the result.
void attend(Task t, uint d0) {
    uint id = gl_LocalInvocationID.x, d = d0 + id;
    float acc[SUMS];
    [[unroll]] for (uint i = 0; i < SUMS; i++) acc[i] = runtime_zero();
    float lane_sum = runtime_zero();
    for (uint j0 = t.low - t.low % LANES; j0 <= t.high; j0 += KEYS) {
        add_products(t, j0);
        barrier();
        find_weights(t, j0);
        barrier();
        if (id < SUMS) lane_sum = add_weights(lane_sum);
        if (d < v_dim) add_values(d, acc);
    }
    barrier();
    find_inverses(t, lane_sum);
    if (d < v_dim) {
        [[unroll]] for (uint h = 0; h < HEADS; h++) {
            precise float result = tree_of(acc, h) * inverses[h];
            if (t.head + h <= t.last_head) attended[t.row * out_stride + (t.head + h) * v_dim + d] = result;
        }
    }
    barrier();
}

void main() {
    uint group = heads / kv_heads, tiles = (group + HEADS - 1) / HEADS;
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_WorkGroupID.x; i < kv_heads * tiles; i += gl_NumWorkGroups.x) {
            uint kv = i / tiles, high = start + row;
            uint low = window != 0 && high >= window ? high - window + 1 : 0;
            Task t = Task(row, kv, kv * group + i % tiles * HEADS, (kv + 1) * group - 1, low, high);
            find_maxima(t);
            for (uint d0 = 0; d0 < v_dim; d0 += gl_WorkGroupSize.x) attend(t, d0);
        }
    }
}
