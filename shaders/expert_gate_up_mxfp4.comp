// act[p] = swiglu(gate x, up x) for each pair p of an expert (a slot of the slab) and a row of x; gate and up are MXFP4.
//
// table [2 + 2*pairs]  count, 0, then (slot, row) of each pair
// x     [rows][rounds*64] vec4, as include/mxfp4.glsl says; columns past the matrix's are 0
// slab  [slots][slot_stride] uvec4, bound twice: as uvec4 (codes) and as uint (scales)
// act   [pairs][act_rounds*256] float in the layout of x, for expert_down_mxfp4; zeros past the matrix's rows
//
// An invocation computes 4 rows of gate, then the same 4 of up, for the pairs y, y + groups in y, ...: the loop ends at
// the count, so a dispatch recorded once serves any number of pairs. Both at once would share the loads of x, but take twice
// the registers, and on a CPU more code than its instruction cache holds.
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

// A zero that came of a zero is one on every device: that of the sigmoid, which is never subnormal, too.
float activation(float gate, float up) {
    float act = elementary_swiglu(gate, up);
    if (FLUSHES == 0 || !too_small(act) || gate == 0.0 || up == 0.0 || elementary_sigmoid(gate) == 0.0) return act;
    return uintBitsToFloat(NOT_A_NUMBER);
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
        float gate[4], up[4] = float[4](0.0, 0.0, 0.0, 0.0);
        uint slot = table[2 + 2 * p], row = table[3 + 2 * p];
        for (int m = 0; m < 2; m++) {  // a loop, so that the code is there once
            gate = up;
            multiply(slot, row, real, part, m == 0 ? gate_codes : up_codes, m == 0 ? gate_scales : up_scales, up);
        }
        for (int r = 0; r < 4; r++) {
            act[p * act_rounds * 256 + act_at + 4 * r] = tile < tiles ? activation(gate[r], up[r]) : 0.0;
        }
    }
    for (uint p = gl_WorkGroupID.y + work; p < count; p += gl_NumWorkGroups.y) {
        for (int r = 0; r < 4; r++) act[p * act_rounds * 256 + act_at + 4 * r] = 0.0;
    }
}
