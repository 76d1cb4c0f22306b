// Copies words on their way into a slab that the host can't write.
//
// place  [4] uint: words from the slab's start, how many, the rest unused
// source [..], slab [..] uint
//
// An invocation copies every (invocations)th word.
#version 450

layout(local_size_x = 64) in;
layout(std430, binding = 0) readonly buffer Place { uint place[]; };
layout(std430, binding = 1) readonly buffer Source { uint source[]; };
layout(std430, binding = 2) writeonly buffer Slab { uint slab[]; };

void main() {
    uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < place[1]; i += step) slab[place[0] + i] = source[i];
}
