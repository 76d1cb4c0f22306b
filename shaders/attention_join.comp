// The last of three kernels, after attention_part: the last three steps of the trees, the sink, and the division.
//
// maxima [rows][heads][8], sums [rows][heads][8][v_dim + 1]; out [rows][out_stride] float, heads times v_dim
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "elementary.glsl"
#include "step.glsl"
#include "tree.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer Slab { float slab[]; };
layout(std430, binding = 2) readonly buffer Maxima { float found[]; };
layout(std430, binding = 3) readonly buffer Sums { float sums[]; };
layout(std430, binding = 4) writeonly buffer Out { float attended[]; };
layout(push_constant) uniform Push {
    uint heads;
    uint v_dim;
    uint out_stride;  // floats a row
    uint has_sink;    // 0 or 1
    uint sinks_at;    // words
};

const uint PARTS = 8;

// part r takes r + 4, then r + 2, r + 1
float joined(uint at) {
    uint by = v_dim + 1;
    precise vec4 fours = vec4(sums[at], sums[at + by], sums[at + 2 * by], sums[at + 3 * by])
                       + vec4(sums[at + 4 * by], sums[at + 5 * by], sums[at + 6 * by], sums[at + 7 * by]);
    return tree4(fours);
}

float inverse_of(uint at, uint maxima_at, uint head) {
    precise float den = joined(at + v_dim);
    if (has_sink != 0) {
        float sink = slab[sinks_at + head], most = sink;
        for (uint part = 0; part < PARTS; part++) most = found[maxima_at + part] > most ? found[maxima_at + part] : most;
        precise float distance = sink - most;
        den = den + elementary_exp(distance);
    }
    return elementary_reciprocal(den);
}

void main() {
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_GlobalInvocationID.x; i < heads * v_dim; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
            uint head = i / v_dim, head_at = row * heads + head, at = head_at * PARTS * (v_dim + 1);
            precise float result = joined(at + i % v_dim) * inverse_of(at, head_at * PARTS, head);
            attended[row * out_stride + i] = result;
        }
    }
}
