// Attention of a picture's patches, of some of them over all, or over those that are at most `reach` away; one dispatch.
//
// q [rows][heads][head_dim]: patches start to start + rows - 1, turned; all patches' turned keys [kv_heads][cache_rows][head_dim]
// from keys_at words on, and values [kv_heads][cache_rows][v_dim] from values_at on, patch j in row j
// slab: the heads' sinks as float bits from sinks_at words on; out [rows][out_stride] float, heads times v_dim
//
// As attention.comp, but for what a row sees, and for the sink, which may be added to the first key's score instead.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "float_controls.glsl"
#include "elementary.glsl"
#include "step.glsl"
#include "tree.glsl"

layout(constant_id = 0) const uint HEADS = 1;  // 1 or 2
layout(constant_id = 1) const uint STEPS = 1;  // head_dim / 32, rounded up

layout(local_size_x = 128) in;
layout(std430, binding = 1) readonly buffer Q { float q[]; };
layout(std430, binding = 2) readonly buffer Keys { float keys[]; };
layout(std430, binding = 3) readonly buffer Values { float values[]; };
layout(std430, binding = 4) readonly buffer Slab { float slab[]; };
layout(std430, binding = 5) writeonly buffer Out { float attended[]; };
layout(push_constant) uniform Push {
    uint heads;
    uint kv_heads;
    uint head_dim;
    uint v_dim;
    uint out_stride;  // floats a row
    uint reach;       // 2^32 - 1: all patches
    uint cache_rows;
    uint keys_at;     // words
    uint values_at;
    uint has_sink;    // 0 or 1: in the denominator
    uint key0;        // 0 or 1: on the first key's score
    uint sinks_at;
    uint scale_bits;  // float32(head_dim ** -0.5)
};

#define PATCHES
#define KEY_STRIDE 1
#include "attention.glsl"
#include "attend.glsl"
