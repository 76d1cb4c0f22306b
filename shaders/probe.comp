// What a device must do with floats to be used at all: each operation over patterns that the host compares with its own.
//
// a, b, c [n] float in; results [8][n] float out: a*b, a+b, a-b, a*b+c unfused, exp(a), reciprocal(a), rsqrt(a), and in the
// last row the 16 e2m1 codes as unpackHalf2x16 decodes them (2^-14 of their value; zeros past 16).
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "elementary.glsl"

layout(local_size_x = 32) in;
layout(std430, binding = 0) readonly buffer A { float a[]; };
layout(std430, binding = 1) readonly buffer B { float b[]; };
layout(std430, binding = 2) readonly buffer C { float c[]; };
layout(std430, binding = 3) writeonly buffer Results { float results[]; };
layout(push_constant) uniform Push {
    uint n;
};

void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i >= n) return;
    precise float product = a[i] * b[i];
    precise float sum = a[i] + b[i];
    precise float difference = a[i] - b[i];
    precise float two_steps = product + c[i];
    results[i] = product;
    results[n + i] = sum;
    results[2 * n + i] = difference;
    results[3 * n + i] = two_steps;
    results[4 * n + i] = elementary_exp(a[i]);
    results[5 * n + i] = elementary_reciprocal(a[i]);
    results[6 * n + i] = elementary_rsqrt(a[i]);
    uint code = ((i & 7) << 9) | ((i & 8) << 12);
    results[7 * n + i] = i < 16 ? unpackHalf2x16(code).x : 0.0;
}
