// y[r] = the bfloat16 row ids[first + r] of a table, exact. A table in several slabs takes a dispatch for each part, which
// writes the rows whose ids it holds.
//
// ids [rows] uint; table [ids of this part][items] uvec4, two columns a word, the lower half first; y [rows][stride] float
#version 450
#extension GL_GOOGLE_include_directive : require
#include "step.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer Ids { uint ids[]; };
layout(std430, binding = 2) readonly buffer Table { uint table[]; };
layout(std430, binding = 3) writeonly buffer Y { uint y[]; };
layout(push_constant) uniform Push {
    uint width;
    uint stride;    // floats a row of y
    uint items;     // uvec4 a row of the table
    uint w_at;      // words from the slab's start
    uint first_id;  // of this part
    uint count;     // ids of this part
};

void main() {
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        uint id = ids[first + row] - first_id;  // wraps below the part: then it is no smaller than count
        if (id >= count) continue;
        for (uint i = gl_GlobalInvocationID.x; i < width; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
            uint word = table[w_at + id * items * 4 + (i >> 1)];
            y[row * stride + i] = (i & 1) == 0 ? word << 16 : word & 0xFFFF0000u;
        }
    }
}
