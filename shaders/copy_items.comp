// Copies one packed expert from the staging buffer into its slot of a slab that the host can't write.
//
// place  [4] uint: the slot's start in the slab, in uvec4; the rest unused
// source [count] uvec4
// slab   [..] uvec4
//
// An invocation copies every (invocations)th item.
#version 450

layout(local_size_x = 32) in;
layout(std430, binding = 0) readonly buffer Place { uint place[]; };
layout(std430, binding = 1) readonly buffer Source { uvec4 source[]; };
layout(std430, binding = 2) writeonly buffer Slab { uvec4 slab[]; };
layout(push_constant) uniform Push {
    uint count;
};

void main() {
    uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < count; i += step) slab[place[0] + i] = source[i];
}
