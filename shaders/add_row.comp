// y = x + a row, to every row of x: a product's bias.
//
// x, y [rows][stride] float; slab: the row as float bits from row_at words on
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "step.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Slab { float slab[]; };
layout(std430, binding = 3) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint width;
    uint stride;  // floats a row
    uint row_at;  // words from the slab's start
};

void main() {
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_GlobalInvocationID.x; i < width; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
            precise float sum = x[row * stride + i] + slab[row_at + i];
            y[row * stride + i] = sum;
        }
    }
}
