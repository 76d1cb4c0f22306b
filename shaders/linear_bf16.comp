// y = x times a matrix of bfloat16: include/linear.glsl says how.
//
// w [n][items] uvec4, two columns a word, the lower half first
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "float_controls.glsl"
#include "step.glsl"
#include "tree.glsl"
#define GROUP 2

layout(std430, binding = 1) readonly buffer X { vec4 x[]; };
layout(std430, binding = 2) readonly buffer W { uvec4 w[]; };
layout(std430, binding = 3) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint n;         // outputs: rows of the matrix
    uint items;     // uvec4 a row of the matrix
    uint x_stride;  // floats a row
    uint w_at;      // words from the slab's start, a multiple of 4
    uint y_stride;  // floats a row
    uint y_at;      // where this matrix's outputs begin in a row
};

void decode(uvec4 words, out vec4 v[GROUP]) {
    v[0] = uintBitsToFloat(words << 16);
    v[1] = uintBitsToFloat(words & 0xFFFF0000u);
}

uint scales_of(uint j) {
    return 0;
}

vec4 scaled(vec4 partial, uint scales, uint round) {
    return partial;
}

float finished(float total, uint j) {
    return total;
}
#include "linear.glsl"
