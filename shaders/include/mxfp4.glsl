// A part of a product with an MXFP4 matrix: ROWS whole rows, all 32 lanes, the tree in registers, in one invocation.
//
// 8 invocations share a tile of 32 rows. The matrix is stored as [tile][lane quad in the tree's order 0 4 2 6 1 5 3 7][round]
// [row of 4][invocation], each item the uvec4 of 4 neighbouring lanes' words; its scales as [tile][lane quad, same order]
// [round][invocation], each a uint of the 4 rows' bytes, as a block of 32 columns is just one lane quad's. x is stored
// [round][lane quad, natural order][column of the word], each item the vec4 of the same 4 lanes. A round is 32 words, one a
// lane: 256 columns.

layout(constant_id = 0) const uint SELECT_DECODE = 0;  // 1 where unpackHalf2x16 flushes subnormal halves
layout(constant_id = 1) const uint SHARE_LOADS = 0;    // 1 where subgroups have 8 invocations or more

// The lane quad at a place in the tree's order: its 3 bits reversed.
uint quad_at(uint place) {
    return ((place & 1) << 2) | (place & 2) | (place >> 2);
}

// Codes c and c + 4 of each word as halves 2^-14 of their value, in the low and the high half.
uvec4 halves(uvec4 q, int c) {
    uvec4 magnitude = c < 3 ? q << (9 - 4 * c) : q >> 3;
    uvec4 sign = q << (12 - 4 * c);
    return (magnitude & 0x0E000E00u) | (sign & 0x80008000u);
}

// The same without any subnormal: halves' exponents are moved to a float's by hand.
vec4 select_decode(uvec4 half_bits) {
    uvec4 magnitude = half_bits & 0x0E00u;
    uvec4 normal = (magnitude << 13) + (112u << 23);
    uvec4 small = mix(uvec4(0), uvec4(112u << 23), equal(magnitude, uvec4(0x0200u)));
    uvec4 bits = mix(small, normal, greaterThan(magnitude, uvec4(0x0200u)));
    return uintBitsToFloat(bits | ((half_bits & 0x8000u) << 16));
}

void decode(uvec4 q, out vec4 v[8]) {
    for (int c = 0; c < 4; c++) {
        uvec4 h = halves(q, c);
        if (SELECT_DECODE != 0) {
            v[c] = select_decode(h & 0xFFFFu);
            v[c + 4] = select_decode(h >> 16);
        } else {
            vec2 a = unpackHalf2x16(h.x), b = unpackHalf2x16(h.y), d = unpackHalf2x16(h.z), e = unpackHalf2x16(h.w);
            v[c] = vec4(a.x, b.x, d.x, e.x);
            v[c + 4] = vec4(a.y, b.y, d.y, e.y);
        }
    }
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

// One word of each of 4 lanes times x, the products added in column order.
vec4 word_product(uvec4 q, vec4 x[8]) {
    vec4 v[8];
    decode(q, v);
    precise vec4 p = v[0] * x[0];
    for (int c = 1; c < 8; c++) {
        precise vec4 product = v[c] * x[c];
        p = p + product;
    }
    return p;
}

// 2^(byte - 127); byte 0 is subnormal, 255 never occurs.
float scale_of(uint scales, int index) {
    uint exponent = (scales >> (8 * index)) & 0xFFu;
    return uintBitsToFloat(exponent == 0 ? 0x00400000u : exponent << 23);
}
