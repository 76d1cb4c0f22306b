// y = a + b, element by element.
//
// a, b, y [rows][stride] float
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "step.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer A { float a[]; };
layout(std430, binding = 2) readonly buffer B { float b[]; };
layout(std430, binding = 3) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint width;
    uint stride;  // floats a row
};

void main() {
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_GlobalInvocationID.x; i < width; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
            precise float sum = a[row * stride + i] + b[row * stride + i];
            y[row * stride + i] = sum;
        }
    }
}
