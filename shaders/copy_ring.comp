// The rows that a window layer's next block may see, from one ring to another: the last `window` - 1 positions before
// `start`, position p in row p mod from_rows of the one, in row p mod to_rows of the other.
//
// from [kv_heads][from_rows][width], to [kv_heads][to_rows][width] words, from from_at and to_at words on
#version 450
#extension GL_GOOGLE_include_directive : require
#include "step.glsl"

layout(local_size_x = 64) in;
layout(std430, binding = 1) readonly buffer From { uint from[]; };
layout(std430, binding = 2) writeonly buffer To { uint to[]; };
layout(push_constant) uniform Push {
    uint kv_heads;
    uint width;
    uint window;
    uint from_rows;
    uint from_at;
    uint to_rows;
    uint to_at;
};

void main() {
    uint count = min(start, window - 1);
    for (uint r = gl_WorkGroupID.y; r < count * kv_heads; r += gl_NumWorkGroups.y) {
        uint head = r / count, position = start - 1 - r % count;
        uint source = from_at + (head * from_rows + position % from_rows) * width;
        uint target = to_at + (head * to_rows + position % to_rows) * width;
        for (uint i = gl_LocalInvocationID.x; i < width; i += gl_WorkGroupSize.x) to[target + i] = from[source + i];
    }
}
