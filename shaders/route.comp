// The router: scores = sigmoid(logits); the `chosen` largest of score + bias, the lower id among equals, NaN below all;
// weight = (score * reciprocal(total)) * scaling, total the chosen scores from +0 in that order, + 1e-20.
//
// logits [rows][stride] float; slab: the biases as float bits from bias_at words on; ids [rows][chosen] uint, weights
// [rows][chosen] float, best first. A group of 32 takes a row; at most 1024 experts.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "float_controls.glsl"
#include "elementary.glsl"
#include "step.glsl"

layout(local_size_x = 32) in;
layout(std430, binding = 1) readonly buffer Logits { float logits[]; };
layout(std430, binding = 2) readonly buffer Slab { float slab[]; };
layout(std430, binding = 3) writeonly buffer Ids { uint ids[]; };
layout(std430, binding = 4) writeonly buffer Weights { float weights[]; };
layout(push_constant) uniform Push {
    uint experts;
    uint stride;        // floats a row of logits
    uint chosen;
    uint bias_at;       // words from the slab's start
    uint scaling_bits;  // of a float32
};

const uint NONE = 0xFFFFFFFFu;
const float ROUTER_FLOOR = 1e-20;

shared float scores[1024];
shared float keys[1024];  // score + bias
shared uint best[32];     // the best of each invocation's experts that are left
shared uint taken[1024];

bool is_nan(float value) {
    return (floatBitsToUint(value) & MAGNITUDE_BITS) > INFINITY_BITS;
}

// Whether expert a comes before expert b.
bool before(uint a, uint b) {
    if (a == NONE || b == NONE) return b == NONE && a != NONE;
    bool a_nan = is_nan(keys[a]), b_nan = is_nan(keys[b]);
    if (a_nan || b_nan) return a_nan == b_nan ? a < b : b_nan;
    return keys[a] == keys[b] ? a < b : keys[a] > keys[b];
}

void find_best(uint lane) {
    uint found = NONE;
    for (uint e = lane; e < experts; e += 32) {
        if (taken[e] == 0 && before(e, found)) found = e;
    }
    best[lane] = found;
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    for (uint row = gl_WorkGroupID.x; row < rows; row += gl_NumWorkGroups.x) {
        for (uint e = lane; e < experts; e += 32) {
            scores[e] = elementary_sigmoid(logits[row * stride + e]);
            precise float key = scores[e] + slab[bias_at + e];
            keys[e] = key;
            taken[e] = 0;
        }
        precise float total = runtime_zero();
        for (uint c = 0; c < chosen; c++) {
            find_best(lane);
            barrier();
            uint winner = best[0];
            for (uint i = 1; i < 32; i++) winner = before(best[i], winner) ? best[i] : winner;
            total = total + scores[winner];
            barrier();
            if (lane == 0) {
                taken[winner] = c + 1;
                ids[row * chosen + c] = winner;
            }
            barrier();
        }
        total = total + ROUTER_FLOOR;
        float inverse = elementary_reciprocal(total);
        for (uint e = lane; e < experts; e += 32) {
            precise float share = scores[e] * inverse;
            precise float weight = share * uintBitsToFloat(scaling_bits);
            if (taken[e] > 0) weights[row * chosen + taken[e] - 1] = weight;
        }
        barrier();
    }
}
