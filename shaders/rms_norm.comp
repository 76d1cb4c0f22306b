// y[r] = (x * rsqrt(ss * inverse_width + eps)) * weight of row first + r of x, ss its sum of squares: g = 1, a lane each.
//
// x, y [rows][stride] float; slab: the weights as float bits from w_at words on
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "elementary.glsl"
#include "step.glsl"

layout(local_size_x = 32) in;
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Slab { float slab[]; };
layout(std430, binding = 3) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint width;
    uint stride;              // floats a row, of x and y
    uint w_at;                // words from the slab's start
    uint eps_bits;            // of a float32
    uint inverse_width_bits;  // float32(1 / width)
};

shared float lanes[32];

void main() {
    uint lane = gl_LocalInvocationID.x;
    for (uint row = gl_WorkGroupID.x; row < rows; row += gl_NumWorkGroups.x) {
        uint at = (first + row) * stride;
        precise float acc = runtime_zero();
        for (uint i = lane; i < width; i += 32) {
            precise float square = x[at + i] * x[at + i];
            acc = acc + square;
        }
        lanes[lane] = acc;
        barrier();
        for (uint half_lanes = 16; half_lanes > 0; half_lanes >>= 1) {
            if (lane < half_lanes) {
                precise float sum = lanes[lane] + lanes[lane + half_lanes];
                lanes[lane] = sum;
            }
            barrier();
        }
        precise float mean = lanes[0] * uintBitsToFloat(inverse_width_bits);
        precise float shifted = mean + uintBitsToFloat(eps_bits);
        float root = elementary_rsqrt(shifted);
        for (uint i = lane; i < width; i += 32) {
            precise float normed = x[at + i] * root;
            precise float result = normed * slab[w_at + i];
            y[row * stride + i] = result;
        }
        barrier();
    }
}
