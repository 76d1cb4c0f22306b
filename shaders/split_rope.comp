// A fused qkv row to its q, k and v heads: q and k turned by position, v times the value scale.
//
// qkv    [rows][stride] float: `chunks` times [Q heads | K heads | V heads]
// tables [rows][2][turned] float: cosines, sines
// q [rows][heads][head_dim], k [rows][kv_heads][head_dim], v [rows][kv_heads][v_dim] float
//
// Of q's and k's heads the pairs (i, i + turned) below 2 * turned are rotated, the rest passes:
// a*cos - b*sin, b*cos + a*sin.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "step.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer Qkv { float qkv[]; };
layout(std430, binding = 2) readonly buffer Tables { float tables[]; };
layout(std430, binding = 3) writeonly buffer Q { float q[]; };
layout(std430, binding = 4) writeonly buffer K { float k[]; };
layout(std430, binding = 5) writeonly buffer V { float v[]; };
layout(push_constant) uniform Push {
    uint stride;            // floats a row of qkv
    uint chunks;
    uint heads;             // all of q's
    uint kv_heads;
    uint head_dim;
    uint v_dim;
    uint turned;            // pairs of a head that are turned: rope_dim / 2
    uint value_scale_bits;  // of a float32
};

float rotated(uint row, uint head_at, uint i) {
    uint pair = i < turned ? i : i - turned;
    if (i >= 2 * turned) return qkv[head_at + i];
    float a = qkv[head_at + pair], b = qkv[head_at + pair + turned];
    float c = tables[2 * row * turned + pair], s = tables[(2 * row + 1) * turned + pair];
    precise float ac = a * c, bs = b * s, bc = b * c, as = a * s;
    precise float first_half = ac - bs, second_half = bc + as;
    return i < turned ? first_half : second_half;
}

void split(uint row, uint i) {
    uint q_part = heads / chunks * head_dim, k_part = kv_heads / chunks * head_dim, v_part = kv_heads / chunks * v_dim;
    uint chunk_width = q_part + k_part + v_part;
    uint chunk = i / chunk_width, j = i % chunk_width, at = row * stride + chunk * chunk_width;
    if (j < q_part) {
        q[(row * chunks + chunk) * q_part + j] = rotated(row, at + j - j % head_dim, j % head_dim);
    } else if (j < q_part + k_part) {
        j -= q_part;
        k[(row * chunks + chunk) * k_part + j] = rotated(row, at + q_part + j - j % head_dim, j % head_dim);
    } else {
        j -= q_part + k_part;
        precise float scaled = qkv[at + q_part + k_part + j] * uintBitsToFloat(value_scale_bits);
        v[(row * chunks + chunk) * v_part + j] = scaled;
    }
}

void main() {
    uint width = heads * head_dim + kv_heads * (head_dim + v_dim);
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_GlobalInvocationID.x; i < width; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) split(row, i);
    }
}
