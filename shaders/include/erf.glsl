// erf as in cpu_fallback/elementary.py, after elementary.glsl: the same steps and the same constants.

const float ERF_SLOPE = 1.1283791670955126;
const float SQRT_HALF = 0.7071067811865476;
const float ERF_END = 4.0;
const uint ERF_TINY_BITS = 0x21800000u;  // 2^-60

// x where |x| is from 2^-60 to 1.
float erf_near(float x) {
    precise float s = x * x;
    precise float q = 7.853864372009411e-05 * s + -0.0008010194869711995;
    q = q * s + 0.005188327748328447;
    q = q * s + -0.026853812858462334;
    q = q * s + 0.1128358542919159;
    q = q * s + -0.3761262595653534;
    q = q * s + 0.12837916612625122;
    precise float result = x + x * q;
    return result;
}

// Of x's magnitude from 1 to 4.
float erf_far(float x) {
    precise float p = 2.1697622287319973e-05 * x + -0.00044147277367301285;
    p = p * x + 0.00420528557151556;
    p = p * x + -0.025210341438651085;
    p = p * x + 0.10842210054397583;
    p = p * x + 0.633216381072998;
    p = p * x + 1.1295802593231201;
    p = p * x + -0.00018846840248443186;
    precise float result = 1.0 - elementary_exp(-p);
    return result;
}

float elementary_erf(float x) {
    uint bits = floatBitsToUint(x), magnitude = bits & MAGNITUDE_BITS, sign = bits & SIGN_BIT;
    if (magnitude > INFINITY_BITS) return uintBitsToFloat(NAN_BITS);
    if (magnitude < ERF_TINY_BITS) {
        precise float small = uintBitsToFloat(magnitude < SMALLEST_NORMAL_BITS ? sign : bits) * ERF_SLOPE;
        return small;
    }
    if (magnitude <= ONE_BITS) return erf_near(x);
    float size = uintBitsToFloat(magnitude);
    return uintBitsToFloat(floatBitsToUint(erf_far(size < ERF_END ? size : ERF_END)) | sign);
}
