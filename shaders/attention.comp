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
// A group takes a row and HEADS query heads of one kv head. Scores are computed twice, once for m, so that none is stored.
// 32 positions (a round) at a time: an invocation adds one lane of several dot products; then one each takes a dot product's
// tree; then one each takes a column of v, all 32 lanes' sums in registers.
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
const uint SUMS = HEADS * LANES;  // named, as each product written out would make an array type of its own
const uint PITCH = 33;  // of a dot product's lanes in shared memory, so that neighbours lie in other banks

shared float products[SUMS * PITCH];  // [head][key][lane]
shared float weights[SUMS];           // e_j of a round, later other numbers of each lane
shared float inverse[HEADS];

// What a group works on.
struct Task {
    uint row;
    uint kv;
    uint head;  // the first of HEADS; the last ones may be past the kv head's and are computed in vain
    uint last_head;
    uint low;   // positions low..high are visible
    uint high;
};

uint head_of(Task t, uint h) {
    return min(t.head + h, t.last_head);
}

bool visible(Task t, uint j) {
    return j >= t.low && j <= t.high;
}

// scores of 32 positions from j0 on: that of invocation id's head id / 32 and position id % 32. All invocations call it.
float score(Task t, uint j0) {
    uint id = gl_LocalInvocationID.x, lane = id % LANES;
    for (uint key = id / LANES; key < LANES; key += gl_WorkGroupSize.x / LANES) {
        uint j = j0 + key;
        if (!visible(t, j)) continue;
        bool own = j >= start;
        uint at = own ? ((j - start) * kv_heads + t.kv) * head_dim
                      : keys_at + (t.kv * cache_rows + j % cache_rows) * head_dim;
        precise float acc[HEADS];
        [[unroll]] for (uint h = 0; h < HEADS; h++) acc[h] = runtime_zero();
        for (uint d = lane; d < head_dim; d += LANES) {
            float key_value = own ? k[at + d] : keys[at + d];
            [[unroll]] for (uint h = 0; h < HEADS; h++) {
                precise float product = q[(t.row * heads + head_of(t, h)) * head_dim + d] * key_value;
                acc[h] = acc[h] + product;
            }
        }
        [[unroll]] for (uint h = 0; h < HEADS; h++) products[(h * LANES + key) * PITCH + lane] = acc[h];
    }
    barrier();
    float result = 0.0;
    if (id < SUMS && visible(t, j0 + lane)) {
        vec4 quads[8];
        [[unroll]] for (uint i = 0; i < 8; i++) {
            uint at = id * PITCH + 4 * i;
            quads[i] = vec4(products[at], products[at + 1], products[at + 2], products[at + 3]);
        }
        precise float scaled = tree32(quads[0], quads[1], quads[2], quads[3], quads[4], quads[5], quads[6], quads[7])
                             * uintBitsToFloat(scale_bits);
        result = scaled;
    }
    barrier();
    return result;
}

// The larger one, or whichever is NaN.
float larger(float a, float b) {
    return b > a || (floatBitsToUint(b) & MAGNITUDE_BITS) > INFINITY_BITS ? b : a;
}

float sink_of(Task t, uint h) {
    return slab[sinks_at + head_of(t, h)];
}

// The maximum that invocation id's head id / 32 subtracts.
float find_maximum(Task t) {
    uint id = gl_LocalInvocationID.x, lane = id % LANES;
    float m = uintBitsToFloat(INFINITY_BITS | SIGN_BIT);
    for (uint j0 = t.low - t.low % LANES; j0 <= t.high; j0 += LANES) {
        float s = score(t, j0);
        if (visible(t, j0 + lane)) m = larger(m, s);
    }
    if (id < SUMS) weights[id] = m;
    barrier();
    if (id < SUMS) {
        for (uint i = 0; i < LANES; i++) m = larger(m, weights[id - lane + i]);
        if (has_sink != 0 && sink_of(t, id / LANES) > m) m = sink_of(t, id / LANES);
    }
    barrier();
    return m;
}

// inverse[head] = reciprocal(the sum of the head's lanes, and the sink's share)
void find_inverse(Task t, float lane_sum, float m) {
    uint id = gl_LocalInvocationID.x;
    if (id < SUMS) weights[id] = lane_sum;
    barrier();
    for (uint half_lanes = LANES / 2; half_lanes > 0; half_lanes /= 2) {
        if (id < SUMS && id % LANES < half_lanes) {
            precise float sum = weights[id] + weights[id + half_lanes];
            weights[id] = sum;
        }
        barrier();
    }
    if (id < SUMS && id % LANES == 0) {
        precise float den = weights[id];
        if (has_sink != 0) {
            precise float distance = sink_of(t, id / LANES) - m;
            den = den + elementary_exp(distance);
        }
        inverse[id / LANES] = elementary_reciprocal(den);
    }
    barrier();
}

void add_values(Task t, uint j0, uint d, inout float acc[SUMS]) {
    [[unroll]] for (uint lane = 0; lane < LANES; lane++) {
        uint j = j0 + lane;
        if (visible(t, j)) {
            float value = j >= start ? v[((j - start) * kv_heads + t.kv) * v_dim + d]
                                     : values[values_at + (t.kv * cache_rows + j % cache_rows) * v_dim + d];
            [[unroll]] for (uint h = 0; h < HEADS; h++) {
                precise float product = weights[h * LANES + lane] * value;
                precise float sum = acc[h * LANES + lane] + product;
                acc[h * LANES + lane] = sum;
            }
        }
    }
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
void attend(Task t, float m, uint d0) {
    uint id = gl_LocalInvocationID.x, lane = id % LANES, d = d0 + id;
    float acc[SUMS];
    [[unroll]] for (uint i = 0; i < SUMS; i++) acc[i] = runtime_zero();
    precise float lane_sum = runtime_zero();
    for (uint j0 = t.low - t.low % LANES; j0 <= t.high; j0 += LANES) {
        precise float distance = score(t, j0) - m;
        if (id < SUMS && visible(t, j0 + lane)) {
            float e = elementary_exp(distance);
            weights[id] = e;
            lane_sum = lane_sum + e;
        }
        barrier();
        if (d < v_dim) add_values(t, j0, d, acc);
    }
    barrier();
    find_inverse(t, lane_sum, m);
    if (d < v_dim) {
        [[unroll]] for (uint h = 0; h < HEADS; h++) {
            precise float result = tree_of(acc, h) * inverse[h];
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
            float m = find_maximum(t);
            for (uint d0 = 0; d0 < v_dim; d0 += gl_WorkGroupSize.x) attend(t, m, d0);
        }
    }
}
