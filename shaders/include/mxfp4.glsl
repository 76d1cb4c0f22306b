// One invocation's part of a product with an MXFP4 matrix: ROWS_PER whole rows, all 32 lanes, the tree in registers.
//
// The matrix is stored in blocks of 8 rows: [block][lane quad in the tree's order 0 4 2 6 1 5 3 7][round][row of 8], each
// item the uvec4 of 4 neighbouring lanes' words; its scales are [block][lane quad, same order][round][8 bytes], as a block
// of 32 columns is just one lane quad's. x is stored [round][lane quad, natural order][column of the word], each item the
// vec4 of the same 4 lanes. A round is 32 words, one a lane: 256 columns.
//
// Before the include: ROWS_PER (4 or 8), and the functions
//   uvec4 load_codes(uint at)   vec4 load_x(uint at)   uint load_scales(uint word)

layout(constant_id = 0) const uint SELECT_DECODE = 0;  // 1 where unpackHalf2x16 flushes subnormal halves

const uint TREE_ORDER[8] = uint[8](0, 4, 2, 6, 1, 5, 3, 7);

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
