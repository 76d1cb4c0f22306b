// y = (c * rsqrt(ss * inverse_width + eps)) * weight, c = x - (the row's sum) * inverse_width, ss c's sum of squares: both
// sums with g = 1, a lane each. `unit` rows of x stand side by side in a row of y.
//
// x [rows * unit][x_stride] float; slab: the weights as float bits from w_at words on; y [rows][y_stride] float
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
    uint unit;
    uint x_stride;            // floats a row
    uint y_stride;
    uint w_at;                // words from the slab's start
    uint eps_bits;            // of a float32
    uint inverse_width_bits;  // float32(1 / width)
};

shared float lanes[32];

// The tree over every invocation's number.
float tree_over_lanes(float own) {
    uint lane = gl_LocalInvocationID.x;
    barrier();  // whoever still reads the last tree's
    lanes[lane] = own;
    barrier();
    for (uint half_lanes = 16; half_lanes > 0; half_lanes >>= 1) {
        if (lane < half_lanes) {
            precise float sum = lanes[lane] + lanes[lane + half_lanes];
            lanes[lane] = sum;
        }
        barrier();
    }
    return lanes[0];
}

float mean_of(uint at) {
    precise float acc = runtime_zero();
    for (uint i = gl_LocalInvocationID.x; i < width; i += 32) acc = acc + x[at + i];
    precise float mean = tree_over_lanes(acc) * uintBitsToFloat(inverse_width_bits);
    return mean;
}

float root_of(uint at, float mean) {
    precise float acc = runtime_zero();
    for (uint i = gl_LocalInvocationID.x; i < width; i += 32) {
        precise float centred = x[at + i] - mean;
        precise float square = centred * centred;
        acc = acc + square;
    }
    precise float shifted = tree_over_lanes(acc) * uintBitsToFloat(inverse_width_bits) + uintBitsToFloat(eps_bits);
    return elementary_rsqrt(shifted);
}

void main() {
    for (uint row = gl_WorkGroupID.x; row < rows * unit; row += gl_NumWorkGroups.x) {
        uint from = row * x_stride, to = row / unit * y_stride + row % unit * width;
        float mean = mean_of(from), root = root_of(from, mean);
        for (uint i = gl_LocalInvocationID.x; i < width; i += 32) {
            precise float centred = x[from + i] - mean;
            precise float normed = centred * root;
            precise float result = normed * slab[w_at + i];
            y[to + i] = result;
        }
    }
}
