// act[p] = swiglu(gate x, up x) for each pair p of an expert (a slot of the slab) and a row of x; gate and up are MXFP4.
//
// table [2 + 2*pairs]  count, 0, then (slot, row) of each pair
// x     [rows][rounds*64] vec4, as include/mxfp4.glsl says; columns past the matrix's are 0
// slab  [slots][slot_stride] uvec4, bound twice: as uvec4 (codes) and as uint (scales)
// act   [pairs][act_rounds*256] float in the layout of x, for expert_down_mxfp4; zeros past the matrix's rows
//
// An invocation computes 4 rows of gate and the same 4 of up for the pairs y, y + groups in y, ...: the loop ends at the
// count, so a dispatch recorded once serves any number of pairs.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_ballot : require
#include "float_controls.glsl"
#include "elementary.glsl"

layout(local_size_x = 32) in;
layout(std430, binding = 0) readonly buffer Table { uint table[]; };
layout(std430, binding = 1) readonly buffer X { vec4 x_rows[]; };
layout(std430, binding = 2) readonly buffer Codes { uvec4 codes[]; };
layout(std430, binding = 3) readonly buffer Scales { uint scales[]; };
layout(std430, binding = 4) writeonly buffer Act { float act[]; };

layout(push_constant) uniform Push {
    uint rounds;       // of the matrix's columns: columns / 256, rounded up
    uint tiles;        // of 32 rows
    uint act_rounds;   // of the result, as columns of the next product
    uint slot_stride;  // uvec4 a slot
    uint gate_codes;   // uvec4 from the slot's start
    uint up_codes;
    uint gate_scales;  // words from the slot's start
    uint up_scales;
};

#include "mxfp4.glsl"

// Written out, as not every compiler unrolls the loop over rows. A row of gate and the same of up.
#define ROW(r)                                                                                                       \
    {                                                                                                                \
        precise vec4 g = word_product(codes[code_at + gate_codes + 8 * r], x) * vec4(scale_of(gate_scale, r));       \
        precise vec4 u = word_product(codes[code_at + up_codes + 8 * r], x) * vec4(scale_of(up_scale, r));           \
        acc[r] = acc[r] + g;                                                                                         \
        acc[r + 4] = acc[r + 4] + u;                                                                                 \
    }

void multiply(uint slot, uint row, uint tile, uint part, out float gate[4], out float up[4]) {
    vec4 one[8], two[8], four[8], total[8];  // partial sums of the tree: 2, 4 and 8 lane quads wait for their other half
    uint code_base = slot * slot_stride, scale_base = 4 * code_base;
    for (uint t = 0; t < 8; t++) {
        precise vec4 acc[8];
        for (int r = 0; r < 8; r++) acc[r] = vec4(0.0);
        for (uint round = 0; round < rounds; round++) {
            vec4 x[8];
            LOAD_X(x, x_rows, (row * rounds + round) * 64 + quad_at(t) * 8)
            uint item = ((tile * 8 + t) * rounds + round) * 8 + part;
            uint gate_scale = scales[scale_base + gate_scales + item];
            uint up_scale = scales[scale_base + up_scales + item];
            uint code_at = code_base + 4 * item - 3 * part;
            ROW(0) ROW(1) ROW(2) ROW(3)
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
    for (int r = 0; r < 4; r++) {
        precise vec2 g = total[r].xy + total[r].zw, u = total[r + 4].xy + total[r + 4].zw;
        precise float gate_sum = g.x + g.y, up_sum = u.x + u.y;
        gate[r] = gate_sum;
        up[r] = up_sum;
    }
}

void main() {
    uint part = gl_GlobalInvocationID.x & 7, tile = gl_GlobalInvocationID.x >> 3;
    uint real = min(tile, tiles - 1);  // where one of a subgroup works all do: its first 8 are there to share loads
    // 8 rows, those of a pair of invocations, are the columns of one word of the next product.
    uint word = tile * 4 + (part >> 1);
    uint act_at = (word >> 2) * 32 + (part & 1) * 16 + (word & 3);
    uint count = table[0];
    bool any_rows = subgroupBallot(tile < tiles) != uvec4(0);  // else the subgroup only writes zeros
    uint work = any_rows ? count : 0;
    for (uint p = gl_WorkGroupID.y; p < work; p += gl_NumWorkGroups.y) {
        float gate[4], up[4];
        multiply(table[2 + 2 * p], table[3 + 2 * p], real, part, gate, up);
        for (int r = 0; r < 4; r++) {
            act[p * act_rounds * 256 + act_at + 4 * r] = tile < tiles ? elementary_swiglu(gate[r], up[r]) : 0.0;
        }
    }
    for (uint p = gl_WorkGroupID.y + work; p < count; p += gl_NumWorkGroups.y) {
        for (int r = 0; r < 4; r++) act[p * act_rounds * 256 + act_at + 4 * r] = 0.0;
    }
}
