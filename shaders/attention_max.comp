// The first of three kernels that are `attention` with 8 groups for each of its groups: for few rows and many positions,
// where attention.comp alone would leave most of a device idle. The sums are the same: part r of 8 has the lanes r, r + 8,
// r + 16 and r + 24, a whole branch of the tree.
//
// maxima [rows][heads][8] float: the largest score of the chunks z, z + 8, ... of the visible positions. The rest as in
// attention.comp.
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
layout(std430, binding = 3) readonly buffer Keys { float keys[]; };
layout(std430, binding = 4) writeonly buffer Maxima { float found[]; };
layout(push_constant) uniform Push {
    uint heads;
    uint kv_heads;
    uint head_dim;
    uint window;      // 0: all positions
    uint cache_rows;
    uint keys_at;     // words
    uint scale_bits;  // float32(head_dim ** -0.5)
};

#define KEY_STRIDE 1
#include "attention.glsl"

const uint PARTS = 8;

void find_maxima(Task t, uint part) {
    float m[HEADS];
    [[unroll]] for (uint h = 0; h < HEADS; h++) m[h] = uintBitsToFloat(INFINITY_BITS | SIGN_BIT);
    for (uint j0 = t.low - t.low % LANES + part * KEYS; j0 <= t.high; j0 += PARTS * KEYS) {
        add_products(t, j0);
        barrier();
        take_maxima(t, j0, m);
        barrier();
    }
    reduce_maxima(m);
}

void main() {
    uint id = gl_LocalInvocationID.x;
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_WorkGroupID.x; i < tasks(); i += gl_NumWorkGroups.x) {
            Task t = task_of(row, i);
            load_q(t);
            for (uint part = gl_WorkGroupID.z; part < PARTS; part += gl_NumWorkGroups.z) {
                find_maxima(t, part);
                if (id < HEADS) found[(row * heads + head_of(t, id)) * PARTS + part] = maxima[id];
                barrier();
            }
        }
    }
}
