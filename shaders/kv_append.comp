// The block's keys and values into a layer's cache: position p into row p mod cache_rows; of a long block the last rows.
//
// k [rows][kv_heads][head_dim], v [rows][kv_heads][v_dim]; keys [kv_heads][cache_rows][head_dim] from keys_at words on,
// values [kv_heads][cache_rows][v_dim] from values_at on
#version 450
#extension GL_GOOGLE_include_directive : require
#include "step.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer K { uint k[]; };
layout(std430, binding = 2) readonly buffer V { uint v[]; };
layout(std430, binding = 3) writeonly buffer Keys { uint keys[]; };
layout(std430, binding = 4) writeonly buffer Values { uint values[]; };
layout(push_constant) uniform Push {
    uint kv_heads;
    uint head_dim;
    uint v_dim;
    uint cache_rows;
    uint keys_at;    // words
    uint values_at;
};

void main() {
    uint skip = rows > cache_rows ? rows - cache_rows : 0;
    for (uint row = skip + gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        uint cache_row = (start + row) % cache_rows, step_by = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
        for (uint i = gl_GlobalInvocationID.x; i < kv_heads * head_dim; i += step_by) {
            uint head = i / head_dim, d = i % head_dim;
            keys[keys_at + (head * cache_rows + cache_row) * head_dim + d] = k[row * kv_heads * head_dim + i];
        }
        for (uint i = gl_GlobalInvocationID.x; i < kv_heads * v_dim; i += step_by) {
            uint head = i / v_dim, d = i % v_dim;
            values[values_at + (head * cache_rows + cache_row) * v_dim + d] = v[row * kv_heads * v_dim + i];
        }
    }
}
