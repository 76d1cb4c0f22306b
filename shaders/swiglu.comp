// y = (gate * sigmoid(gate)) * up, element by element.
//
// gate, up [rows][in_stride] float, from gate_at and up_at in a row: they may be windows of one tensor; y [rows][y_stride]
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "elementary.glsl"
#include "step.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer Gate { float gate[]; };
layout(std430, binding = 2) readonly buffer Up { float up[]; };
layout(std430, binding = 3) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint width;
    uint in_stride;  // floats a row
    uint gate_at;
    uint up_at;
    uint y_stride;
};

void main() {
    for (uint row = gl_WorkGroupID.y; row < rows; row += gl_NumWorkGroups.y) {
        for (uint i = gl_GlobalInvocationID.x; i < width; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
            uint at = row * in_stride + i;
            y[row * y_stride + i] = elementary_swiglu(gate[gate_at + at], up[up_at + at]);
        }
    }
}
