// Causal attention of a block's rows over a layer's cache and the block itself, full or over a window; one dispatch.
//
// q [rows][heads][head_dim], k [rows][kv_heads][head_dim], v [rows][kv_heads][v_dim]: the block's own, turned and scaled
// keys [kv_heads][cache_rows][head_dim] from keys_at words on, values [kv_heads][cache_rows][v_dim] from values_at on:
//   position j in row j mod cache_rows, for j below `start`
// slab: the heads' sinks as float bits from sinks_at words on; out [rows][out_stride] float, heads times v_dim
//
// Row i sees positions 0..start+i, with a window W the last W of them. s_j = tree(q.k_j, g = 1) * scale; m the maximum of
// the visible s_j, and of the sink; e_j = exp(s_j - m); den = tree of e_j, + exp(sink - m); out_d = tree of e_j * v_jd,
// times reciprocal(den). Over keys the lane is the position mod 32, positions increasing.
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
layout(std430, binding = 2) readonly buffer K { float k[]; };
layout(std430, binding = 3) readonly buffer V { float v[]; };
layout(std430, binding = 4) readonly buffer Keys { float keys[]; };
layout(std430, binding = 5) readonly buffer Values { float values[]; };
layout(std430, binding = 6) readonly buffer Slab { float slab[]; };
layout(std430, binding = 7) writeonly buffer Out { float attended[]; };
layout(push_constant) uniform Push {
    uint heads;
    uint kv_heads;
    uint head_dim;
    uint v_dim;
    uint out_stride;  // floats a row
    uint window;      // 0: all positions
    uint cache_rows;
    uint keys_at;     // words
    uint values_at;
    uint has_sink;    // 0 or 1
    uint sinks_at;
    uint scale_bits;  // float32(head_dim ** -0.5)
};

#define KEY_STRIDE 1
#include "attention.glsl"
#include "attend.glsl"
