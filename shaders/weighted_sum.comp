// total[r] = weights[r][c] * y[r][c] added over the choices c in order, starting from +0.
//
// y [rows][choices][stride], weights [rows][choices], total [rows][stride] float
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "step.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer Y { float y[]; };
layout(std430, binding = 2) readonly buffer Weights { float weights[]; };
layout(std430, binding = 3) writeonly buffer Total { float total[]; };
layout(push_constant) uniform Push {
    uint width;
    uint stride;  // floats a row
    uint choices;
};

void main() {
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_GlobalInvocationID.x; i < width; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
            precise float sum = runtime_zero();
            for (uint c = row * choices; c < (row + 1) * choices; c++) {
                precise float product = weights[c] * y[c * stride + i];
                sum = sum + product;
            }
            total[row * stride + i] = sum;
        }
    }
}
