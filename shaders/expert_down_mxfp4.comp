// y[p] = down act[p] for each pair p of an expert (a slot of the slab) and a row of activations; down is MXFP4.
//
// table [2 + 2*pairs]  count, 0, then (slot, row) of each pair; the row is not used here
// act   [pairs][rounds*64] vec4, as include/mxfp4.glsl says
// slab  [slots][slot_stride] uvec4, bound twice: as uvec4 (codes) and as uint (scales)
// y     [pairs][blocks*8] float
//
// An invocation computes 8 rows for the pairs y, y + groups in y, ..., up to the count.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "float_controls.glsl"

layout(local_size_x = 32) in;
layout(std430, binding = 0) readonly buffer Table { uint table[]; };
layout(std430, binding = 1) readonly buffer Act { vec4 act_rows[]; };
layout(std430, binding = 2) readonly buffer Codes { uvec4 codes[]; };
layout(std430, binding = 3) readonly buffer Scales { uint scales[]; };
layout(std430, binding = 4) writeonly buffer Y { float y[]; };

layout(push_constant) uniform Push {
    uint rounds;       // of the matrix's columns: columns / 256, rounded up
    uint blocks;       // of 8 rows
    uint slot_stride;  // uvec4 a slot
    uint down_codes;   // uvec4 from the slot's start
    uint down_scales;  // words from the slot's start
};

#include "mxfp4.glsl"

void multiply(uint slot, uint row, uint block, out float result[8]) {
    vec4 one[8], two[8], four[8], total[8];  // partial sums of the tree: 2, 4 and 8 lane quads wait for their other half
    uint code_base = slot * slot_stride, scale_base = 4 * code_base;
    for (uint t = 0; t < 8; t++) {
        precise vec4 acc[8];
        for (int r = 0; r < 8; r++) acc[r] = vec4(0.0);
        for (uint round = 0; round < rounds; round++) {
            uint x_at = (row * rounds + round) * 64 + TREE_ORDER[t] * 8;
            vec4 x[8];
            for (int c = 0; c < 8; c++) {
                precise vec4 scaled = act_rows[x_at + c] * 16384.0;  // 2^14, which the decoded codes lack
                x[c] = scaled;
            }
            uint item = (block * 8 + t) * rounds + round;
            uint low = scales[scale_base + down_scales + 2 * item];
            uint high = scales[scale_base + down_scales + 2 * item + 1];
            uint code_at = code_base + down_codes + 8 * item;
            for (int r = 0; r < 8; r++) {
                float scale = scale_of(r < 4 ? low : high, r & 3);
                precise vec4 p = word_product(codes[code_at + r], x) * vec4(scale);
                acc[r] = acc[r] + p;
            }
        }
        for (int r = 0; r < 8; r++) {
            precise vec4 sum = acc[r];
            if ((t & 1) == 0) { one[r] = sum; continue; }
            sum = one[r] + sum;
            if ((t & 2) == 0) { two[r] = sum; continue; }
            sum = two[r] + sum;
            if ((t & 4) == 0) { four[r] = sum; continue; }
            sum = four[r] + sum;
            total[r] = sum;
        }
    }
    for (int r = 0; r < 8; r++) {
        precise vec2 pair = total[r].xy + total[r].zw;
        precise float sum = pair.x + pair.y;
        result[r] = sum;
    }
}

void main() {
    uint block = gl_GlobalInvocationID.x;
    if (block >= blocks) return;
    uint count = table[0];
    for (uint p = gl_WorkGroupID.y; p < count; p += gl_NumWorkGroups.y) {
        float result[8];
        multiply(table[2 + 2 * p], p, block, result);
        for (int r = 0; r < 8; r++) y[(p * blocks + block) * 8 + r] = result[r];
    }
}
