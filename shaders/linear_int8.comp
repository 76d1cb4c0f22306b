// y = x times a matrix of int8 codes with a float32 scale for each row: include/linear.glsl says how.
//
// w [n][items] uvec4, four columns a word, the lowest byte first
// s slab of words: at s_at the n scales
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "float_controls.glsl"
#include "step.glsl"
#include "tree.glsl"
#define GROUP 4

layout(std430, binding = 1) readonly buffer X { vec4 x[]; };
layout(std430, binding = 2) readonly buffer W { uvec4 w[]; };
layout(std430, binding = 3) readonly buffer S { uint s[]; };
layout(std430, binding = 4) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint n;         // outputs: rows of the matrix
    uint items;     // uvec4 a row of the matrix
    uint x_stride;  // floats a row
    uint w_at;      // words from the slab's start, a multiple of 4
    uint y_stride;  // floats a row
    uint y_at;      // where this matrix's outputs begin in a row
    uint s_at;      // words from the slab's start
};

void decode(uvec4 words, out vec4 v[GROUP]) {
    ivec4 codes = ivec4(words);
    v[0] = vec4((codes << 24) >> 24);
    v[1] = vec4((codes << 16) >> 24);
    v[2] = vec4((codes << 8) >> 24);
    v[3] = vec4(codes >> 24);
}

uint scales_of(uint j) {
    return 0;
}

vec4 scaled(vec4 partial, uint scales, uint round) {
    return partial;
}

float finished(float total, uint j) {
    precise float result = total * uintBitsToFloat(s[s_at + j]);
    return result;
}
#include "linear.glsl"
