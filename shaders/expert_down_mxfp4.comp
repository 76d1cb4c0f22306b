// y[p] = down act[p] for each pair p of an expert (a slot of the slab) and a row of activations; down is MXFP4.
//
// table [2 + 2*pairs]  count, 0, then (slot, row) of each pair; the row is not used here
// act   [pairs][rounds*64] vec4, as include/mxfp4.glsl says
// slab  [slots][slot_stride] uvec4, bound twice: as uvec4 (codes) and as uint (scales)
// y     [pairs][tiles*32] float
//
// An invocation computes 4 rows for the pairs y, y + groups in y, ..., up to the count.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_ballot : require
#include "float_controls.glsl"

layout(local_size_x = 32) in;
layout(std430, binding = 0) readonly buffer Table { uint table[]; };
layout(std430, binding = 1) readonly buffer Act { vec4 x_rows[]; };
layout(std430, binding = 2) readonly buffer Codes { uvec4 codes[]; };
layout(std430, binding = 3) readonly buffer Scales { uint scales[]; };
layout(std430, binding = 4) writeonly buffer Y { float y[]; };

layout(push_constant) uniform Push {
    uint rounds;       // of the matrix's columns: columns / 256, rounded up
    uint tiles;        // of 32 rows
    uint slot_stride;  // uvec4 a slot
    uint down_codes;   // uvec4 from the slot's start
    uint down_scales;  // words from the slot's start
};

#include "mxfp4.glsl"

void main() {
    uint part = gl_GlobalInvocationID.x & 7, tile = gl_GlobalInvocationID.x >> 3;
    uint real = min(tile, tiles - 1);  // all invocations work, so that a subgroup's first 8 are there to share loads
    uint count = table[0];
    for (uint p = gl_WorkGroupID.y; p < count; p += gl_NumWorkGroups.y) {
        float result[4];
        multiply(table[2 + 2 * p], p, real, part, down_codes, down_scales, result);
        if (tile == real) {
            for (int r = 0; r < 4; r++) y[(p * tiles + tile) * 32 + part * 4 + r] = result[r];
        }
    }
}
