// The second of three kernels, after attention_max: the sums of every 8th position.
//
// maxima [rows][heads][8]; sums [rows][heads][8][v_dim + 1] float: for part r the branch of the trees with lanes r, r + 8,
// r + 16, r + 24, of e_j * v_jd and, last, of e_j. The rest as in attention.comp.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "float_controls.glsl"
#include "elementary.glsl"
#include "step.glsl"
#include "tree.glsl"

layout(constant_id = 0) const uint HEADS = 1;  // 1 or 2
layout(constant_id = 1) const uint STEPS = 1;  // head_dim / 32, rounded up

layout(local_size_x = 128) in;
layout(std430, binding = 1) readonly buffer Q { float q[]; };
layout(std430, binding = 2) readonly buffer K { float k[]; };
layout(std430, binding = 3) readonly buffer V { float v[]; };
layout(std430, binding = 4) readonly buffer Keys { float keys[]; };
layout(std430, binding = 5) readonly buffer Values { float values[]; };
layout(std430, binding = 6) readonly buffer Slab { float slab[]; };
layout(std430, binding = 7) readonly buffer Maxima { float found[]; };
layout(std430, binding = 8) writeonly buffer Sums { float sums[]; };
layout(push_constant) uniform Push {
    uint heads;
    uint kv_heads;
    uint head_dim;
    uint v_dim;
    uint window;      // 0: all positions
    uint cache_rows;
    uint keys_at;     // words
    uint values_at;
    uint has_sink;    // 0 or 1
    uint sinks_at;
    uint scale_bits;  // float32(head_dim ** -0.5)
};

#define KEY_STRIDE 8
#include "attention.glsl"

const uint PARTS = 8;
const uint BRANCH = 4;  // lanes of a part

shared uint places[KEYS];  // where a key's values begin, in the cache or in the block
shared float lane_sums[HEADS * BRANCH];

// The whole maximum of a head, and of its sink.
void load_maxima(Task t) {
    uint id = gl_LocalInvocationID.x;
    if (id < HEADS) {
        uint head = head_of(t, id);
        float most = found[head * PARTS + t.row * heads * PARTS];
        for (uint part = 1; part < PARTS; part++) most = larger(most, found[(t.row * heads + head) * PARTS + part]);
        maxima[id] = has_sink != 0 ? larger(most, slab[sinks_at + head]) : most;
    }
    barrier();
}

void find_weights(Task t, uint j0) {
    uint id = gl_LocalInvocationID.x, j = j0 + KEY_STRIDE * id;
    if (!visible(t, j)) return;
    places[id] = j >= start ? own_row(t, j) * v_dim : values_at + cached_row(t, j) * v_dim;
    [[unroll]] for (uint h = 0; h < HEADS; h++) {
        precise float distance = score(h) - maxima[h];
        weights[h * KEYS + id] = elementary_exp(distance);
    }
}

// The chunk's keys from `first_key` up to `end`, which all lie in one buffer: 4 keys, one a lane, at a time.
#define ADD_VALUES(buffer, first_key, end)                                                      \
    for (uint round = (first_key) / BRANCH * BRANCH; round < (end); round += BRANCH) {          \
        [[unroll]] for (uint lane = 0; lane < BRANCH; lane++) {                                 \
            uint key = round + lane;                                                            \
            if (key >= (first_key) && key < (end)) {                                            \
                float value = buffer[places[key] + d];                                          \
                [[unroll]] for (uint h = 0; h < HEADS; h++) {                                   \
                    precise float product = weights[h * KEYS + key] * value;                    \
                    precise float sum = acc[h][lane] + product;                                 \
                    acc[h][lane] = sum;                                                         \
                }                                                                               \
            }                                                                                   \
        }                                                                                       \
    }

// Invocation id adds the weights of head id / 4's lane id % 4.
float add_weights(Task t, uint j0, float lane_sum) {
    uint id = gl_LocalInvocationID.x;
    precise float sum = lane_sum;
    for (uint key = id % BRANCH; key < KEYS; key += BRANCH) {
        if (visible(t, j0 + KEY_STRIDE * key)) sum = sum + weights[id / BRANCH * KEYS + key];
    }
    return sum;
}

void write_sums(Task t, uint part, uint d, vec4 acc[HEADS], float lane_sum) {
    uint id = gl_LocalInvocationID.x;
    if (id < HEADS * BRANCH) lane_sums[id] = lane_sum;
    barrier();
    [[unroll]] for (uint h = 0; h < HEADS; h++) {
        uint at = ((t.row * heads + t.head + h) * PARTS + part) * (v_dim + 1), from = h * BRANCH;
        if (t.head + h > t.last_head) continue;
        if (d < v_dim) sums[at + d] = tree4(acc[h]);
        vec4 all = vec4(lane_sums[from], lane_sums[from + 1], lane_sums[from + 2], lane_sums[from + 3]);
        if (d == 0) sums[at + v_dim] = tree4(all);
    }
    barrier();
}

// Columns d0 to d0 + 127 of a part's sums, and with the first of them the weights' own.
void add_part(Task t, uint part, uint d0) {
    uint id = gl_LocalInvocationID.x, d = d0 + id;
    vec4 acc[HEADS];
    [[unroll]] for (uint h = 0; h < HEADS; h++) acc[h] = vec4(runtime_zero());
    float lane_sum = runtime_zero();
    for (uint j0 = t.low - t.low % LANES + part; j0 <= t.high; j0 += KEY_STRIDE * KEYS) {
        add_products(t, j0);
        barrier();
        find_weights(t, j0);
        barrier();
        if (id < HEADS * BRANCH) lane_sum = add_weights(t, j0, lane_sum);
        uint first_key = key_of(t.low, j0), middle = key_of(start, j0), end = key_of(t.high + 1, j0);
        if (d < v_dim) {
            ADD_VALUES(values, first_key, middle)
            ADD_VALUES(v, max(first_key, middle), end)
        }
    }
    barrier();
    write_sums(t, part, d, acc, lane_sum);
}

void main() {
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_WorkGroupID.x; i < tasks(); i += gl_NumWorkGroups.x) {
            Task t = task_of(row, i);
            load_q(t);
            load_maxima(t);
            for (uint part = gl_WorkGroupID.z; part < PARTS; part += gl_NumWorkGroups.z) {
                for (uint d0 = 0; d0 < v_dim; d0 += gl_WorkGroupSize.x) add_part(t, part, d0);
            }
            barrier();
        }
    }
}
