// A part of a product with an MXFP4 matrix: 4 whole rows, all 32 lanes, the tree in registers, in one invocation. The kernel
// declares x_rows, codes, scales and the push constants rounds and slot_stride before it includes this.
//
// 8 invocations share a tile of 32 rows. The matrix is stored as [tile][lane quad in the tree's order 0 4 2 6 1 5 3 7][round]
// [row of 4][invocation], each item the uvec4 of 4 neighbouring lanes' words; its scales as [tile][lane quad, same order]
// [round][invocation], each a uint of the 4 rows' bytes, as a block of 32 columns is just one lane quad's. x is stored
// [round][lane quad, natural order][column of the word], each item the vec4 of the same 4 lanes. A round is 32 words, one a
// lane: 256 columns.

layout(constant_id = 0) const uint SELECT_DECODE = 0;  // 1 where unpackHalf2x16 flushes subnormal halves
layout(constant_id = 1) const uint SHARE_LOADS = 0;    // 1 where subgroups have 8 invocations or more
layout(constant_id = 2) const uint FLUSHES = 0;        // 1 where subnormal floats count as zero

const uint LEAST_BITS = 25u << 23;  // 2^-102; see mimo_vk/vulkan/subnormals.py
const uint NOT_A_NUMBER = 0x7FC00000u;

// Whether a product with such a number may meet a subnormal one. Zero counts.
bool too_small(float x) {
    return (floatBitsToUint(x) & 0x7FFFFFFFu) < LEAST_BITS;
}

// The bits of the words' sums times their scales without the signs, or more than LEAST_BITS where a sum is zero.
uvec4 magnitudes(vec4 sums, vec4 scaled) {
    return mix(floatBitsToUint(scaled) & 0x7FFFFFFFu, uvec4(NOT_A_NUMBER), equal(sums, vec4(0.0)));
}

// The lane quad at a place in the tree's order: its 3 bits reversed.
uint quad_at(uint place) {
    return ((place & 1) << 2) | (place & 2) | (place >> 2);
}

// Codes c and c + 4 of a word as halves 2^-14 of their value, in the low and the high half.
uint halves(uint q, int c) {
    uint magnitude = c < 3 ? q << (9 - 4 * c) : q >> 3;
    uint sign = q << (12 - 4 * c);
    return (magnitude & 0x0E000E00u) | (sign & 0x80008000u);
}

// The low half as a float without any subnormal: a half's exponent is moved to a float's by hand.
float select_decode(uint half_bits) {
    uint magnitude = half_bits & 0x0E00u;
    uint normal = (magnitude << 13) + (112u << 23);
    uint small = magnitude == 0x0200u ? 112u << 23 : 0u;
    return uintBitsToFloat((magnitude > 0x0200u ? normal : small) | ((half_bits & 0x8000u) << 16));
}

float low_half(uint h) {
    return SELECT_DECODE != 0 ? select_decode(h) : unpackHalf2x16(h).x;
}

float high_half(uint h) {
    return SELECT_DECODE != 0 ? select_decode(h >> 16) : unpackHalf2x16(h).y;
}

// The 8 columns of 4 lanes of a row, times 2^14, which the decoded codes lack. All invocations of a group ask for the same
// row, so 8 of a subgroup can load a column each.
#define LOAD_X(x, rows, at)                                                         \
    if (SHARE_LOADS != 0) {                                                         \
        precise vec4 own = rows[(at) + (gl_SubgroupInvocationID & 7)] * 16384.0;    \
        x[0] = subgroupBroadcast(own, 0); x[1] = subgroupBroadcast(own, 1);         \
        x[2] = subgroupBroadcast(own, 2); x[3] = subgroupBroadcast(own, 3);         \
        x[4] = subgroupBroadcast(own, 4); x[5] = subgroupBroadcast(own, 5);         \
        x[6] = subgroupBroadcast(own, 6); x[7] = subgroupBroadcast(own, 7);         \
    } else {                                                                        \
        for (int c = 0; c < 8; c++) {                                               \
            precise vec4 scaled = rows[(at) + c] * 16384.0;                         \
            x[c] = scaled;                                                          \
        }                                                                           \
    }

// A lane's word times x, the products added in column order.
float lane_product(uint q, float x0, float x1, float x2, float x3, float x4, float x5, float x6, float x7) {
    uint h0 = halves(q, 0), h1 = halves(q, 1), h2 = halves(q, 2), h3 = halves(q, 3);
    precise float p0 = low_half(h0) * x0, p1 = low_half(h1) * x1, p2 = low_half(h2) * x2, p3 = low_half(h3) * x3;
    precise float p4 = high_half(h0) * x4, p5 = high_half(h1) * x5, p6 = high_half(h2) * x6, p7 = high_half(h3) * x7;
    precise float sum = p0 + p1;
    sum = sum + p2;
    sum = sum + p3;
    sum = sum + p4;
    sum = sum + p5;
    sum = sum + p6;
    sum = sum + p7;
    return sum;
}

// One word of each of 4 lanes times x. Lane by lane: all 32 codes at a time would need more registers than a CPU has.
#define LANE(i) lane_product(q.i, x[0].i, x[1].i, x[2].i, x[3].i, x[4].i, x[5].i, x[6].i, x[7].i)
vec4 word_product(uvec4 q, vec4 x[8]) {
    return vec4(LANE(x), LANE(y), LANE(z), LANE(w));
}

// 2^(byte - 127); byte 0 is subnormal, 255 never occurs.
float scale_of(uint scales, int index) {
    uint exponent = (scales >> (8 * index)) & 0xFFu;
    return uintBitsToFloat(exponent == 0 ? 0x00400000u : exponent << 23);
}

// Written out, as not every compiler unrolls the loop over rows.
#define ROW(r)                                                                  \
    {                                                                           \
        precise vec4 sum = word_product(codes[code_at + 8 * r], x);             \
        precise vec4 scaled = sum * vec4(scale_of(scale, r));                   \
        if (FLUSHES != 0) smallest = min(smallest, magnitudes(sum, scaled));    \
        acc[r] = acc[r] + scaled;                                               \
    }

// 4 rows of one matrix, from part * 4 of the tile on, times a row of x. NaN where a subnormal number may have been met.
void multiply(uint slot, uint row, uint tile, uint part, uint codes_at, uint scales_at, out float result[4]) {
    vec4 one[4], two[4], four[4], total[4];  // partial sums of the tree: 2, 4 and 8 lane quads wait for their other half
    uint code_base = slot * slot_stride, scale_base = 4 * code_base;
    uvec4 smallest = uvec4(NOT_A_NUMBER);
    for (uint t = 0; t < 8; t++) {
        precise vec4 acc[4];
        for (int r = 0; r < 4; r++) acc[r] = vec4(0.0);
        for (uint round = 0; round < rounds; round++) {
            vec4 x[8];
            LOAD_X(x, x_rows, (row * rounds + round) * 64 + quad_at(t) * 8)
            uint item = ((tile * 8 + t) * rounds + round) * 8 + part;
            uint scale = scales[scale_base + scales_at + item];
            uint code_at = code_base + codes_at + 4 * item - 3 * part;
            ROW(0) ROW(1) ROW(2) ROW(3)
        }
        for (int r = 0; r < 4; r++) {
            precise vec4 sum = acc[r];
            if ((t & 1) == 0) { one[r] = sum; continue; }
            sum = one[r] + sum;
            if ((t & 2) == 0) { two[r] = sum; continue; }
            sum = two[r] + sum;
            if ((t & 4) == 0) { four[r] = sum; continue; }
            sum = four[r] + sum;
            total[r] = sum;
        }
    }
    bool inexact = any(lessThan(smallest, uvec4(LEAST_BITS)));
    for (int r = 0; r < 4; r++) {
        precise vec2 pair = total[r].xy + total[r].zw;
        precise float sum = pair.x + pair.y;
        result[r] = inexact ? uintBitsToFloat(NOT_A_NUMBER) : sum;
    }
}
