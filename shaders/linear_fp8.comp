// y = x times a matrix of FP8 e4m3 codes (no NaN) with a float32 scale for each 128 x 128 block: include/linear.glsl says how.
//
// w [n][items] uvec4, four columns a word, the lowest byte first
// s slab of words: at s_at n scale rows, one for each row of the matrix (a fused qkv restarts its grid at each chunk), then
//   the scales [scale rows][blocks] as float bits. A round of 32 words is a block of 128 columns.
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
    uint blocks;    // of 128 columns
};

layout(constant_id = 2) const uint SELECT_DECODE = 0;  // 1 where unpackHalf2x16 flushes subnormal halves

// A code's 7 low bits below a half's sign are 2^-8 of its value: two codes, 16 bits apart, at a time.
uvec4 halves(uvec4 codes) {
    return ((codes & 0x007F007Fu) << 7) | ((codes & 0x00800080u) << 8);
}

// The same without any subnormal: 8 more in the exponent, and what a subnormal lacks made up in whole numbers of 2^-9.
vec4 select_decode(uvec4 codes) {
    uvec4 magnitude = codes & 0x7Fu;
    precise vec4 small = vec4(magnitude) * 0.001953125;
    uvec4 normal = (magnitude << 20) + (120u << 23);
    uvec4 bits = mix(normal, floatBitsToUint(small), lessThan(magnitude, uvec4(8)));
    return uintBitsToFloat(bits | ((codes & 0x80u) << 24));
}

void decode(uvec4 words, out vec4 v[GROUP]) {
    if (SELECT_DECODE != 0) {
        [[unroll]] for (int c = 0; c < 4; c++) v[c] = select_decode(words >> (8 * c));
        return;
    }
    [[unroll]] for (int c = 0; c < 2; c++) {
        uvec4 h = halves(words >> (8 * c));
        vec2 a = unpackHalf2x16(h.x), b = unpackHalf2x16(h.y), d = unpackHalf2x16(h.z), e = unpackHalf2x16(h.w);
        precise vec4 low = vec4(a.x, b.x, d.x, e.x) * 256.0;
        precise vec4 high = vec4(a.y, b.y, d.y, e.y) * 256.0;
        v[c] = low;
        v[c + 2] = high;
    }
}

uint scales_of(uint j) {
    return s_at + n + s[s_at + j] * blocks;
}

vec4 scaled(vec4 partial, uint scales, uint round) {
    precise vec4 result = partial * vec4(uintBitsToFloat(s[scales + round]));
    return result;
}

float finished(float total, uint j) {
    return total;
}
#include "linear.glsl"
