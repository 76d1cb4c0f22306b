// exp, reciprocal, rsqrt, sigmoid and swiglu as in cpu_fallback/elementary.py: the same steps and the same constants,
// each rounded on its own. `precise` does not reach into called functions, so every function declares its own.

const float EXP_LOW = -64.0;
const float EXP_HIGH = 88.72283172607422;
const float LOG2_E = 1.4426950408889634;
const float LN2_HIGH = 0.693359375;
const float LN2_LOW = -0.00021219444170128554;
const float EXP_E2 = 0.4999999403953552;
const float EXP_E3 = 0.1666652113199234;
const float EXP_E4 = 0.04166838899254799;
const float EXP_E5 = 0.00836874544620514;
const float EXP_E6 = 0.0013814540579915047;
const uint SIGN_BIT = 0x80000000u;
const uint MAGNITUDE_BITS = 0x7FFFFFFFu;
const uint FRACTION_BITS = 0x007FFFFFu;
const uint ONE_BITS = 0x3F800000u;
const uint SMALLEST_NORMAL_BITS = 0x00800000u;
const uint INFINITY_BITS = 0x7F800000u;
const uint NAN_BITS = 0x7FC00000u;

float elementary_exp(float x) {
    bool inside = x >= EXP_LOW && x <= EXP_HIGH;
    precise float a = inside ? x : 0.0;
    precise float n = floor(a * LOG2_E + 0.5);
    precise float r = (a - n * LN2_HIGH) - n * LN2_LOW;
    precise float p = EXP_E6 * r + EXP_E5;
    p = p * r + EXP_E4;
    p = p * r + EXP_E3;
    p = p * r + EXP_E2;
    p = (p * (r * r) + r) + 1.0;
    // at n = 128 p is below 1, so the sum of the exponents stays a finite number's
    float y = intBitsToFloat(floatBitsToInt(p) + (int(n) << 23));
    uint outside = x > EXP_HIGH ? INFINITY_BITS : (x < EXP_LOW ? 0u : NAN_BITS);
    return inside ? y : uintBitsToFloat(outside);
}

float elementary_reciprocal(float x) {
    uint bits = floatBitsToUint(x);
    uint magnitude = bits & MAGNITUDE_BITS;
    uint m_bits = (bits & FRACTION_BITS) | ONE_BITS;
    precise float m = uintBitsToFloat(m_bits);
    precise float y = uintBitsToFloat(0x7EF311C7u - m_bits);
    for (int i = 0; i < 4; i++) {
        y = y + y * (1.0 - m * y);
    }
    bool inside = magnitude >= SMALLEST_NORMAL_BITS && magnitude <= 0x7E800000u;
    uint result = floatBitsToUint(y) - (magnitude - m_bits);
    uint outside = magnitude < SMALLEST_NORMAL_BITS ? INFINITY_BITS : 0u;
    uint signed_bits = (inside ? result : outside) | (bits & SIGN_BIT);
    return uintBitsToFloat(magnitude > INFINITY_BITS ? NAN_BITS : signed_bits);
}

float elementary_rsqrt(float x) {
    uint bits = floatBitsToUint(x);
    bool inside = bits >= SMALLEST_NORMAL_BITS && bits < INFINITY_BITS;  // a negative number's bits are larger
    uint a_bits = inside ? bits : ONE_BITS;
    precise float a = uintBitsToFloat(a_bits);
    precise float y = uintBitsToFloat(0x5F3759DFu - (a_bits >> 1));
    for (int i = 0; i < 4; i++) {
        y = y + y * (0.5 - 0.5 * ((a * y) * y));
    }
    bool tiny = (bits & MAGNITUDE_BITS) < SMALLEST_NORMAL_BITS;
    uint outside = tiny ? INFINITY_BITS : (bits == INFINITY_BITS ? 0u : NAN_BITS);
    return inside ? y : uintBitsToFloat(outside);
}

float elementary_sigmoid(float x) {
    precise float denominator = 1.0 + elementary_exp(-x);
    return elementary_reciprocal(denominator);
}

// (gate * sigmoid(gate)) * up
float elementary_swiglu(float gate, float up) {
    precise float silu = gate * elementary_sigmoid(gate);
    precise float product = silu * up;
    return product;
}
