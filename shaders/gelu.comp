// y = (0.5 * x) * (1 + erf(x * sqrt(1/2))), element by element.
//
// x, y [rows][stride] float
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "elementary.glsl"
#include "erf.glsl"
#include "step.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint width;
    uint stride;  // floats a row
};

void main() {
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_GlobalInvocationID.x; i < width; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
            precise float at = x[row * stride + i];
            precise float inner = at * SQRT_HALF;
            precise float result = (0.5 * at) * (1.0 + elementary_erf(inner));
            y[row * stride + i] = result;
        }
    }
}
